{{- define "gpuslice.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "gpuslice.labels" -}}
app: gpushare
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/name: gpuslice
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "gpuslice.extenderUrl" -}}
http://gpushare-schd-extender.{{ .Release.Namespace }}.svc:{{ .Values.extender.port }}/gpushare-scheduler
{{- end }}

{{- define "gpuslice.schedulerTag" -}}
{{ .Values.scheduler.tag | default (printf "v%s.%s.0" .Capabilities.KubeVersion.Major (.Capabilities.KubeVersion.Minor | trimSuffix "+")) }}
{{- end }}

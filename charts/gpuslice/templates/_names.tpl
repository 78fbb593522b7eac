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

{{- define "gpuslice.webhookNames" -}}
{{- $names := list "aliyun.com/gpu-mem" "aliyun.com/gpu-core.percentage" }}
{{- if .Values.webhook.hami.enabled }}
{{- $names = concat $names (list "nvidia.com/gpumem" "nvidia.com/gpumem-percentage" "nvidia.com/gpucores" "nvidia.com/priority") }}
{{- end }}
{{- toJson $names | replace "\"" "'" }}
{{- end }}

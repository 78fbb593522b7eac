{{- define "gpuslice.image" -}}
{{- $name := include "gpuslice.mirrored" (list . .Values.image.repository) }}
{{- if .Values.image.digest }}{{ $name }}@{{ .Values.image.digest }}
{{- else }}{{ $name }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- /* An image's name with the registry of the values in place of its own. */}}
{{- define "gpuslice.mirrored" -}}
{{- $root := first . }}
{{- with $root.Values.imageRegistry }}{{ . }}/{{ regexReplaceAll "^[^/]*[.:][^/]*/" (last $) "" }}
{{- else }}{{ last . }}
{{- end }}
{{- end }}

{{- /*
The three probes of a container: (dict "port" "http" "scheme" "HTTP"). Python on a busy node may need a while to
start, which is no reason to start it again; later it answers or hangs. With "tcp" only the port is looked at.
*/}}
{{- define "gpuslice.probes" -}}
{{- $scheme := .scheme | default "HTTP" -}}
startupProbe:
  {{- if .tcp }}
  tcpSocket: {port: {{ .port }}}
  {{- else }}
  httpGet: {path: {{ .live | default "/healthz" }}, port: {{ .port }}, scheme: {{ $scheme }}}
  {{- end }}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 90
readinessProbe:
  {{- if .tcp }}
  tcpSocket: {port: {{ .port }}}
  {{- else }}
  httpGet: {path: {{ .ready | default "/readyz" }}, port: {{ .port }}, scheme: {{ $scheme }}}
  {{- end }}
  periodSeconds: {{ .readyEvery | default 5 }}
  timeoutSeconds: 5
livenessProbe:
  {{- if .tcp }}
  tcpSocket: {port: {{ .port }}}
  {{- else }}
  httpGet: {path: {{ .live | default "/healthz" }}, port: {{ .port }}, scheme: {{ $scheme }}}
  {{- end }}
  periodSeconds: 20
  timeoutSeconds: 10
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

{{- /* How a Deployment is replaced: on the hosts' network the next pod finds its port taken until this one ends. */}}
{{- define "gpuslice.replaced" -}}
type: RollingUpdate
rollingUpdate: {{ if . }}{maxSurge: 0, maxUnavailable: 1}{{ else }}{maxSurge: 1, maxUnavailable: 0}{{ end }}
{{- end }}

{{- /* Not empty where there is a webhook. Before 1.28 the API server would ask it about every pod. */}}
{{- define "gpuslice.webhook" -}}
{{- if eq (toString .Values.webhook.enabled) "auto" -}}
{{- if and .Values.scheduler.enabled (semverCompare ">=1.28-0" .Capabilities.KubeVersion.Version) }}yes{{ end -}}
{{- else if .Values.webhook.enabled -}}yes{{- end -}}
{{- end }}

{{- define "gpuslice.webhookNames" -}}
{{- $names := list "aliyun.com/gpu-mem" "aliyun.com/gpu-core.percentage" }}
{{- if .Values.webhook.hami.enabled }}
{{- $names = concat $names (list "nvidia.com/gpumem" "nvidia.com/gpumem-percentage" "nvidia.com/gpucores" "nvidia.com/priority") }}
{{- end }}
{{- toJson $names | replace "\"" "'" }}
{{- end }}

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

{{- /*
The agent's container: (dict "root" . "serves" "everybody"). One that serves "holders" gives out nothing new, and where
nobody holds anything kubelet need not know it: it is ready once it runs.
*/}}
{{- define "gpuslice.agent" -}}
{{- $plugin := .root.Values.devicePlugin -}}
- name: gpushare
  image: {{ include "gpuslice.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    - agent
    - --memory-unit={{ .root.Values.memoryUnit }}
    - --library=/usr/share/gpuslice/lib/libgpuslice.so
    - --host-root={{ $plugin.hostDir }}
    {{- if eq .serves "holders" }}
    - --no-new-pods
    {{- else }}
    - --node-label={{ .root.Values.nodeLabel }}
    {{- end }}
    - --watchdog={{ $plugin.watchdog }}
    {{- if .root.Values.allowCgpuDisable }}
    - --allow-cgpu-disable
    {{- end }}
    {{- if $plugin.regionFileSystem }}
    - --region-file-system
    {{- end }}
    - --port={{ $plugin.port }}
    {{- with $plugin.extraArgs }}{{ toYaml . | nindent 4 }}{{- end }}
  env:
    - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
    - {name: NVIDIA_VISIBLE_DEVICES, value: all}
    - {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
    {{- with $plugin.extraEnv }}{{ toYaml . | nindent 4 }}{{- end }}
  # No ports are declared: on the host's network each would keep the next agent off the node.
  # Not ready: kubelet does not follow its list yet; /readyz says why. That is no reason to start it anew.
  {{- $ready := ternary "/healthz" "/readyz" (eq .serves "holders") }}
  {{- include "gpuslice.probes" (dict "port" $plugin.port "ready" $ready) | nindent 2 }}
  resources: {{- toYaml $plugin.resources | nindent 4 }}
  # Root, because kubelet's sockets and the host's folder belong to root. Privileged, because only such a pod may mount
  # for others; else it has root's way past the modes of files alone, as tenants' files have any owner and mode.
  securityContext:
    {{- if $plugin.regionFileSystem }}
    privileged: true
    {{- else }}
    allowPrivilegeEscalation: false
    capabilities: {drop: [ALL], add: [DAC_OVERRIDE, FOWNER{{ if eq $plugin.watchdog "stop" }}, KILL{{ end }}]}
    seccompProfile: {type: RuntimeDefault}
    {{- end }}
    readOnlyRootFilesystem: true
    {{- with $plugin.seLinuxType }}
    seLinuxOptions: {type: {{ . }}}
    {{- end }}
  volumeMounts:
    - {name: device-plugins, mountPath: /var/lib/kubelet/device-plugins}
    - {name: pod-resources, mountPath: /var/lib/kubelet/pod-resources}
    - {name: host-files, mountPath: /var/lib/gpuslice{{ if $plugin.regionFileSystem }}, mountPropagation: Bidirectional{{ end }}}
    {{- if $plugin.fencingDir }}
    - {name: fencing, mountPath: /etc/nvidia-device-plugin, readOnly: true}
    {{- end }}
{{- end }}

{{- define "gpuslice.agentVolumes" -}}
- {name: device-plugins, hostPath: {path: {{ .Values.devicePlugin.devicePluginsDir }}}}
- {name: pod-resources, hostPath: {path: {{ .Values.devicePlugin.kubeletDir }}/pod-resources}}
- {name: host-files, hostPath: {path: {{ .Values.devicePlugin.hostDir }}, type: DirectoryOrCreate}}
{{- with .Values.devicePlugin.fencingDir }}
- {name: fencing, hostPath: {path: {{ . }}, type: DirectoryOrCreate}}
{{- end }}
{{- end }}

{{- /*
The agent's container: (dict "root" . "serves" "everybody"). One that serves "holders" gives out nothing new, and where
nobody holds anything kubelet need not know it: it is ready once it runs.
*/}}
{{- define "gpuslice.agent" -}}
{{- $plugin := .root.Values.devicePlugin -}}
{{- $parks := gt (int $plugin.parkingHostMemoryMiB) 0 -}}
{{- $byDriver := include "gpuslice.driverLimits" .root -}}
- name: gpushare
  args:
    - agent
    - --memory-unit={{ .root.Values.memoryUnit }}
    - --resource-names={{ .root.Values.resourceNames }}
    - --library=/usr/share/gpuslice/lib/libgpuslice.so
    - --host-root={{ $plugin.hostDir }}
    {{- if .root.Values.installers.enabled }}
    - --no-install-library
    {{- end }}
    {{- if eq .serves "holders" }}
    - --no-new-pods
    {{- else }}
    - --node-label={{ .root.Values.nodeLabel }}
    {{- end }}
    - --watchdog={{ $plugin.watchdog }}
    {{- if $parks }}
    - --parking-host-mib={{ $plugin.parkingHostMemoryMiB }}
    {{- end }}
    {{- if .root.Values.allowCgpuDisable }}
    - --allow-cgpu-disable
    {{- end }}
    {{- if $plugin.regionFileSystem }}
    - --region-file-system
    {{- end }}
    {{- if not $byDriver }}
    - --no-driver-limits
    {{- end }}
    {{- if $plugin.driverSoftLimit }}
    - --driver-soft-limit
    {{- end }}
    {{- if $plugin.libraryBesideDriver }}
    - --library-beside-driver
    {{- end }}
    {{- with .root.Values.cdiKind }}
    - --cdi-kind={{ . }}
    {{- end }}
    {{- if .root.Values.dra.enabled }}
    - --dra-plugins={{ $plugin.kubeletDir }}/plugins
    - --dra-registry={{ $plugin.kubeletDir }}/plugins_registry
    {{- end }}
    {{- with .root.Values.tracing.endpoint }}
    - --otlp-endpoint={{ . }}
    {{- end }}
    - --port={{ $plugin.port }}
  env:
    - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
    - {name: NVIDIA_VISIBLE_DEVICES, value: all}
    - {name: NVIDIA_DRIVER_CAPABILITIES, value: {{ ternary "'utility,compute'" "utility" (or $parks (ne $byDriver "")) }}}
  # No ports are declared: on the host's network each would keep the next agent off the node.
  # Not ready: kubelet does not follow its list yet; /readyz says why. That is no reason to start it anew.
  {{- $ready := ternary "/healthz" "/readyz" (eq .serves "holders") }}
  {{- include "gpuslice.probes" (dict "port" $plugin.port "ready" $ready) | nindent 2 }}
  resources: {{- toYaml $plugin.resources | nindent 4 }}
  # Root, because kubelet's sockets and the host's folder belong to root. Privileged, because only such a pod may mount
  # for others and have the driver set limits; else it has root's way past the modes of files alone, as tenants' files have any owner and mode.
  securityContext:
    runAsUser: 0
    {{- if or $plugin.regionFileSystem $byDriver }}
    privileged: true
    {{- else }}
    allowPrivilegeEscalation: false
    capabilities: {drop: [ALL], add: [DAC_OVERRIDE, FOWNER{{ if eq $plugin.watchdog "stop" }}, KILL{{ end }}{{ if $parks }}, SYS_PTRACE{{ end }}]}
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
    {{- if .root.Values.installers.enabled }}
    - {name: library, mountPath: /var/lib/gpuslice/lib, readOnly: true}
    {{- end }}
    {{- if .root.Values.dra.enabled }}
    # kubelet is told the path of a socket, so both see it at the same one.
    - {name: dra-plugins, mountPath: {{ $plugin.kubeletDir }}/plugins}
    - {name: dra-registry, mountPath: {{ $plugin.kubeletDir }}/plugins_registry}
    {{- end }}
    {{- if or .root.Values.dra.enabled $byDriver }}
    - {name: cdi, mountPath: /var/run/cdi}
    {{- end }}
    {{- if or $parks $byDriver }}
    - {name: cgroups, mountPath: /sys/fs/cgroup}
    {{- end }}
    {{- if $plugin.fencingDir }}
    - {name: fencing, mountPath: /etc/nvidia-device-plugin, readOnly: true}
    {{- end }}
{{- end }}

{{- /* Whether the driver may enforce limits; "" if not. It needs a privileged agent. */}}
{{- define "gpuslice.driverLimits" -}}
{{- $wanted := toString .Values.devicePlugin.driverLimits -}}
{{- if or (eq $wanted "true") (and (eq $wanted "auto") .Values.devicePlugin.regionFileSystem) }}true{{ end -}}
{{- end }}

{{- define "gpuslice.agentVolumes" -}}
- {name: device-plugins, hostPath: {path: {{ .Values.devicePlugin.devicePluginsDir }}}}
- {name: pod-resources, hostPath: {path: {{ .Values.devicePlugin.kubeletDir }}/pod-resources}}
- {name: host-files, hostPath: {path: {{ .Values.devicePlugin.hostDir }}, type: DirectoryOrCreate}}
{{- if .Values.installers.enabled }}
- {name: library, hostPath: {path: {{ .Values.devicePlugin.hostDir }}/lib, type: DirectoryOrCreate}}
{{- end }}
{{- if .Values.dra.enabled }}
- {name: dra-plugins, hostPath: {path: {{ .Values.devicePlugin.kubeletDir }}/plugins, type: DirectoryOrCreate}}
- {name: dra-registry, hostPath: {path: {{ .Values.devicePlugin.kubeletDir }}/plugins_registry, type: DirectoryOrCreate}}
{{- end }}
{{- if or .Values.dra.enabled (include "gpuslice.driverLimits" .) }}
- {name: cdi, hostPath: {path: {{ .Values.dra.cdiDir }}, type: DirectoryOrCreate}}
{{- end }}
{{- if or (include "gpuslice.driverLimits" .) (gt (int .Values.devicePlugin.parkingHostMemoryMiB) 0) }}
- {name: cgroups, hostPath: {path: /sys/fs/cgroup}}
{{- end }}
{{- with .Values.devicePlugin.fencingDir }}
- {name: fencing, hostPath: {path: {{ . }}, type: DirectoryOrCreate}}
{{- end }}
{{- end }}

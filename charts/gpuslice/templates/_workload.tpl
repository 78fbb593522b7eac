{{- /*
What the pods of this chart have in common. A template says what is particular about its pod, as a pod template of its
own, and "gpuslice.podTemplate" completes it by what the values say:

  template:
    {{- include "gpuslice.podTemplate" (dict "root" . "values" .Values.extender "pod" (include "gpuslice.extenderPod" .)) | nindent 4 }}

"values" is the workload's section of the values. It may have each of: podLabels, podAnnotations, nodeSelector,
tolerations, affinity, topologySpreadConstraints, priorityClassName, podSecurityContext, securityContext, logLevel,
extraArgs, extraEnv, extraVolumes, extraVolumeMounts, resources.

What the pod says itself stays. Labels, annotations, nodeSelector, tolerations, imagePullSecrets, arguments, variables
and volumes are added; affinity, resources and a variable of the same name take the place of the pod's. What concerns a
container is for the pod's first; "beside" names the section of values of another: (dict "gpushare" .Values.devicePlugin).
A container without an image has that of this chart, and one without a securityContext needs nothing of its node and
has that of the values. "terms" are nodeSelectorTerms of which a node must meet one, whatever affinity the values have.
"driver" true: the pod keeps the driver open, and leaves while NVIDIA's GPU operator replaces it.
*/}}
{{- define "gpuslice.podTemplate" -}}
{{- $all := .root.Values -}}
{{- $own := .values -}}
{{- $pod := fromYaml .pod -}}
{{- with $pod.Error }}{{ fail (printf "%s in %s" . $.pod) }}{{ end -}}
{{- $component := $pod.metadata.labels.component -}}
{{- $standard := dict "app.kubernetes.io/name" ($all.nameOverride | default "gpuslice") "app.kubernetes.io/instance" .root.Release.Name "app.kubernetes.io/component" $component -}}
{{- $selected := $pod.metadata.labels -}}
{{- $_ := set $pod.metadata "labels" (merge (dict) $selected ($own.podLabels | default dict) ($all.podLabels | default dict) ($all.commonLabels | default dict) $standard) -}}
{{- with merge (dict) ($pod.metadata.annotations | default dict) ($own.podAnnotations | default dict) ($all.podAnnotations | default dict) -}}
{{- $_ := set $pod.metadata "annotations" . -}}
{{- end -}}
{{- $spec := $pod.spec -}}
{{- /* The image is for Linux. Whoever labels a node for its cards knows what it runs; all others may meet Windows. */ -}}
{{- $system := empty $spec.nodeSelector | ternary (dict "kubernetes.io/os" "linux") (dict) -}}
{{- with merge (dict) ($spec.nodeSelector | default dict) ($own.nodeSelector | default dict) ($all.nodeSelector | default dict) $system -}}
{{- $_ := set $spec "nodeSelector" . -}}
{{- end -}}
{{- with concat ($spec.tolerations | default list) ($own.tolerations | default list) ($all.tolerations | default list) | uniq -}}
{{- $_ := set $spec "tolerations" . -}}
{{- end -}}
{{- with $own.affinity -}}
{{- $_ := set $spec "affinity" . -}}
{{- end -}}
{{- $free := empty .driver | ternary list (include "gpuslice.driverFree" . | fromYamlArray) -}}
{{- if and .driver $all.gpuOperatorClient -}}
{{- $_ := set $spec "nodeSelector" (merge (dict "nvidia.com/gpu.deploy.client" "true") $spec.nodeSelector) -}}
{{- end -}}
{{- with $terms := .terms | default (empty $free | ternary list (list (dict "matchExpressions" list))) -}}
{{- $affinity := deepCopy ($spec.affinity | default dict) -}}
{{- $node := $affinity.nodeAffinity | default dict -}}
{{- $required := $node.requiredDuringSchedulingIgnoredDuringExecution | default dict -}}
{{- $both := list -}}
{{- range $theirs := $required.nodeSelectorTerms | default (list dict) -}}
{{- range $term := $terms -}}
{{- $both = append $both (merge (dict "matchExpressions" (concat ($theirs.matchExpressions | default list) $term.matchExpressions $free)) $theirs) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $both) -}}
{{- $_ := set $affinity "nodeAffinity" $node -}}
{{- $_ := set $spec "affinity" $affinity -}}
{{- end -}}
{{- $spread := list -}}
{{- range $own.topologySpreadConstraints -}}
{{- $spread = append $spread (merge (dict) . (dict "labelSelector" (dict "matchLabels" (pick $selected "app" "component")))) -}}
{{- end -}}
{{- with $spread -}}
{{- $_ := set $spec "topologySpreadConstraints" . -}}
{{- end -}}
{{- with $own.priorityClassName -}}
{{- $_ := set $spec "priorityClassName" . -}}
{{- end -}}
{{- with merge (dict) ($own.podSecurityContext | default dict) ($all.podSecurityContext | default dict) -}}
{{- $_ := set $spec "securityContext" . -}}
{{- end -}}
{{- with include "gpuslice.pullSecrets" .root | fromYamlArray -}}
{{- $_ := set $spec "imagePullSecrets" . -}}
{{- end -}}
{{- if $spec.hostNetwork -}}
{{- $_ := set $spec "dnsPolicy" "ClusterFirstWithHostNet" -}}
{{- end -}}
{{- $unprivileged := $all.securityContext -}}
{{- if include "gpuslice.openshift" .root -}}
{{- $unprivileged = omit $unprivileged "runAsUser" "runAsGroup" -}}
{{- end -}}
{{- range $index, $container := $spec.containers -}}
{{- $values := get ($.beside | default dict) $container.name | default (eq $index 0 | ternary $own dict) -}}
{{- $env := $container.env | default list -}}
{{- if not $container.image -}}
{{- $_ := set $container "image" (include "gpuslice.image" $.root) -}}
{{- $env = append $env (dict "name" "LOG_LEVEL" "value" ($values.logLevel | default $all.logLevel)) -}}
{{- end -}}
{{- $_ := set $container "imagePullPolicy" $all.image.pullPolicy -}}
{{- $_ := set $container "securityContext" (merge (dict) ($values.securityContext | default dict) ($container.securityContext | default $unprivileged)) -}}
{{- with $values.resources -}}
{{- $_ := set $container "resources" . -}}
{{- end -}}
{{- with $values.extraArgs -}}
{{- $_ := set $container "args" (concat ($container.args | default list) .) -}}
{{- end -}}
{{- $extra := dict -}}
{{- range concat ($all.extraEnv | default list) ($values.extraEnv | default list) -}}
{{- $_ := set $extra .name . -}}
{{- end -}}
{{- $variables := list -}}
{{- range $env -}}
{{- if not (hasKey $extra .name) -}}{{- $variables = append $variables . -}}{{- end -}}
{{- end -}}
{{- range $name := keys $extra | sortAlpha -}}
{{- $variables = append $variables (get $extra $name) -}}
{{- end -}}
{{- with $variables -}}
{{- $_ := set $container "env" . -}}
{{- end -}}
{{- with $values.extraVolumeMounts -}}
{{- $_ := set $container "volumeMounts" (concat ($container.volumeMounts | default list) .) -}}
{{- end -}}
{{- with $values.extraVolumes -}}
{{- $_ := set $spec "volumes" (concat ($spec.volumes | default list) . | uniq) -}}
{{- end -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end }}

{{- /*
Nodes on which nobody is replacing the driver or dividing cards anew: only a module that no process holds can be unloaded.
The operator says so by its label for others' pods (26.7 and later), its older versions by how far an upgrade has come.
*/}}
{{- define "gpuslice.driverFree" -}}
- {key: nvidia.com/gpu.deploy.client, operator: NotIn, values: [paused-for-driver-upgrade, paused-for-mig-change]}
- {key: nvidia.com/gpu-driver-upgrade-state, operator: NotIn, values: [pod-deletion-required, drain-required, pod-restart-required]}
{{- end }}

{{- define "gpuslice.image" -}}
{{- $repository := required "image.repository is required: the image of gpuslice in your own registry, such as registry.example.com/gpuslice. None is published; docs/operate/install.md says how to build it" .Values.image.repository }}
{{- $name := include "gpuslice.mirrored" (list . $repository) }}
{{- if .Values.image.digest }}{{ $name }}@{{ .Values.image.digest }}
{{- else }}{{ $name }}:{{ .Values.image.tag | default .Values.global.imageTag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- /* An image's name with the registry of the values in place of its own. */}}
{{- define "gpuslice.mirrored" -}}
{{- if regexMatch "(:[^/]*|@.*)$" (last .) }}
{{- fail (printf "%s: an image is named without its tag and digest, which have values of their own beside it: tag, digest" (last .)) }}
{{- end }}
{{- $root := first . }}
{{- with $root.Values.global.imageRegistry }}{{ . }}/{{ regexReplaceAll "^[^/]*[.:][^/]*/" (last $) "" }}
{{- else }}{{ last . }}
{{- end }}
{{- end }}

{{- /* As a YAML list. Charts above this one name theirs as words or as objects. */}}
{{- define "gpuslice.pullSecrets" -}}
{{- $found := list }}
{{- range concat (.Values.imagePullSecrets | default list) (.Values.global.imagePullSecrets | default list) }}
{{- $found = append $found (kindIs "string" . | ternary (dict "name" .) .) }}
{{- end }}
{{- toYaml ($found | uniq) }}
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

{{- /* How a Deployment is replaced: on the hosts' network the next pod finds its port taken until this one ends. */}}
{{- define "gpuslice.replaced" -}}
type: RollingUpdate
rollingUpdate: {{ if . }}{maxSurge: 0, maxUnavailable: 1}{{ else }}{maxSurge: 1, maxUnavailable: 0}{{ end }}
{{- end }}

{{- /* Replicas on nodes of their own, where there are enough: the component. */}}
{{- define "gpuslice.apart" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {app: gpushare, component: {{ . }}}
{{- end }}

{{- /*
A workload's PodDisruptionBudget: (dict "root" . "values" .Values.extender "name" "gpushare-schd-extender"). With one
replica it would only keep its node from being drained, so auto makes one for several.
*/}}
{{- define "gpuslice.budget" -}}
{{- $budget := .values.podDisruptionBudget }}
{{- $wanted := toString $budget.enabled }}
{{- if or (eq $wanted "true") (and (eq $wanted "auto") (gt (int .values.replicas) 1)) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
{{ include "gpuslice.metadata" (dict "root" .root "name" .name) }}
spec:
  maxUnavailable: {{ $budget.maxUnavailable }}
  selector:
    matchLabels: {app: gpushare, component: {{ .component | default .name }}}
{{- end }}
{{- end }}

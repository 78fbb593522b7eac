{{- /*
Names, labels and metadata of this chart's objects, and which of its parts are there. What a pod is made of is in
_workload.tpl.
*/}}

{{- /* An object's name: (list . "gpushare-schd-extender"). With fullnameOverride it starts with that instead. */}}
{{- define "gpuslice.name" -}}
{{- $root := first . -}}
{{- with $root.Values.fullnameOverride }}{{ . }}-{{ last $ | trimPrefix "gpushare-" | trimPrefix "gpuslice-" }}
{{- else }}{{ last . }}
{{- end }}
{{- end }}

{{- /* The labels of every object; whatever selects pods uses none of them but app. */}}
{{- define "gpuslice.labels" -}}
app: gpushare
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/name: {{ .Values.nameOverride | default "gpuslice" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /*
The metadata of an object: (dict "root" . "name" "gpushare-schd-extender"). More keys: "namespace" for another than the
release's, "cluster" true for an object without one, "component" for that label, "labels" and "annotations".
*/}}
{{- define "gpuslice.metadata" -}}
metadata:
  name: {{ include "gpuslice.name" (list .root .name) }}
  {{- if not .cluster }}
  namespace: {{ .namespace | default .root.Release.Namespace }}
  {{- end }}
  labels:
    {{- include "gpuslice.labels" .root | nindent 4 }}
    {{- with .component }}
    component: {{ . }}
    {{- end }}
    {{- with .labels }}{{ toYaml . | nindent 4 }}{{- end }}
  {{- with merge (dict) (.annotations | default dict) (.root.Values.commonAnnotations | default dict) }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- /* The name of the service account of a workload: (list . .Values.extender "gpushare-schd-extender"). */}}
{{- define "gpuslice.account" -}}
{{- $own := (index . 1).serviceAccount | default dict -}}
{{- $own.name | default (include "gpuslice.name" (list (first .) (last .))) -}}
{{- end }}

{{- /*
A workload's ServiceAccount: (dict "root" . "values" .Values.extender "name" "gpushare-schd-extender"), unless it is
there already. "token" false mounts none.
*/}}
{{- define "gpuslice.serviceAccount" -}}
{{- $own := .values.serviceAccount | default dict -}}
{{- if ne (toString $own.create) "false" }}
---
apiVersion: v1
kind: ServiceAccount
{{ $meta := include "gpuslice.metadata" (dict "root" .root "name" .name "annotations" $own.annotations) | fromYaml -}}
{{- $_ := set $meta.metadata "name" (include "gpuslice.account" (list .root .values .name)) -}}
{{- toYaml $meta }}
{{- if hasKey . "token" }}
automountServiceAccountToken: {{ .token }}
{{- end }}
{{- end }}
{{- end }}

{{- /*
Rights, and who has them: (dict "root" . "name" N "account" A "rules" RULES), cluster-wide with "cluster" true, else in
"namespace". With "roleName" the rights are those of a ClusterRole that is there already, and "roleKind" says if a Role.
*/}}
{{- define "gpuslice.rights" -}}
{{- if .root.Values.rbac.create }}
{{- $kind := hasKey . "cluster" | ternary "ClusterRole" "Role" }}
{{- if .rules }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
{{ include "gpuslice.metadata" . }}
rules:
  {{- .rules | trim | nindent 2 }}
{{- end }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
{{ include "gpuslice.metadata" . }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .roleKind | default $kind }}
  name: "{{ .roleName | default (include "gpuslice.name" (list .root .name)) }}"
subjects:
  - {kind: ServiceAccount, name: {{ .account }}, namespace: {{ .root.Release.Namespace }}}
{{- end }}
{{- end }}

{{- define "gpuslice.extenderUrl" -}}
{{ include "gpuslice.extenderScheme" . }}://{{ include "gpuslice.extenderHost" . }}:{{ .Values.extender.port }}/gpushare-scheduler
{{- end }}

{{- define "gpuslice.schedulerTag" -}}
{{ .Values.scheduler.tag | default (printf "v%s.%s.0" .Capabilities.KubeVersion.Major (.Capabilities.KubeVersion.Minor | trimSuffix "+")) }}
{{- end }}

{{- /* Not empty where there is a webhook. Before 1.28 the API server would ask it about every pod. */}}
{{- define "gpuslice.webhook" -}}
{{- if eq (toString .Values.webhook.enabled) "auto" -}}
{{- if and .Values.scheduler.enabled (semverCompare ">=1.28-0" .Capabilities.KubeVersion.Version) }}yes{{ end -}}
{{- else if .Values.webhook.enabled -}}yes{{- end -}}
{{- end }}

{{- /* Not empty where the webhook refuses what policies do from 1.30 on. Before 1.28 it would be asked about every write. */}}
{{- define "gpuslice.webhookGuards" -}}
{{- if and (include "gpuslice.webhook" .) (ne (toString .Values.devicePlugin.ownNodeOnly) "false") (semverCompare ">=1.28-0, <1.30-0" .Capabilities.KubeVersion.Version) }}yes{{ end -}}
{{- end }}

{{- /* Not empty on OpenShift, whose namespaces give each pod a user of its own. */}}
{{- define "gpuslice.openshift" -}}
{{- if eq (toString .Values.openshift) "auto" -}}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}yes{{ end -}}
{{- else if .Values.openshift -}}yes{{- end -}}
{{- end }}

{{- /* The resource in which nodes offer the memory of their cards. */}}
{{- define "gpuslice.memoryName" -}}
{{- ternary "gpuslice.io/memory" "aliyun.com/gpu-mem" (eq .Values.resourceNames "gpuslice.io") }}
{{- end }}

{{- define "gpuslice.webhookLabels" -}}
['aliyun.com/gpu-count', 'gpuslice.io/cards', 'gpuslice.io/min-tier', 'pod-group.scheduling.sigs.k8s.io/name', 'pod-group.scheduling.sigs.k8s.io/min-available']
{{- end }}

{{- define "gpuslice.webhookNames" -}}
{{- $names := list "aliyun.com/gpu-mem" "aliyun.com/gpu-core.percentage" "gpuslice.io/memory" "gpuslice.io/compute" }}
{{- if .Values.webhook.hami.enabled }}
{{- $names = concat $names (list "nvidia.com/gpumem" "nvidia.com/gpumem-percentage" "nvidia.com/gpucores" "nvidia.com/priority") }}
{{- end }}
{{- toJson $names | replace "\"" "'" }}
{{- end }}

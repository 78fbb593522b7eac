{{- /*
Which nodes a DaemonSet is for. ACK's label ack.node.gpu.schedule says the same as cgpu in other words, and a node with
that label alone has DaemonSets of its own: a nodeSelector, which `kubectl get ds` shows, knows no "or".
*/}}

{{- /* The DaemonSets of a mode, "shared" or "exclusive", as a YAML list: by which label, and what is behind their names. */}}
{{- define "gpuslice.bothLabels" -}}
- {by: own, suffix: ""}
{{- if .Values.ackNodeLabel }}
- {by: ack, suffix: "-ack"}
{{- end }}
{{- end }}

{{- /* (dict "root" . "by" "ack" "mode" "shared"): terms of a node affinity; none by the label of our own. */}}
{{- define "gpuslice.modeTerms" -}}
{{- if eq .by "ack" }}
- matchExpressions:
    - {key: ack.node.gpu.schedule, operator: In, values: {{ eq .mode "shared" | ternary "[cgpu, share, core_mem]" "[default]" }}}
    - {key: {{ .root.Values.nodeLabel }}, operator: NotIn, values: ["true", "false"]}
{{- else }}
[]
{{- end }}
{{- end }}

{{- /* The same as a nodeSelector. */}}
{{- define "gpuslice.modeSelector" -}}
{{- if eq .by "own" }}
nodeSelector:
  {{ .root.Values.nodeLabel }}: "{{ eq .mode "shared" }}"
{{- end }}
{{- end }}

{{- /* Every node with a card, no matter who labelled it: us, ACK, NVIDIA's or the node's feature discovery, or the provider. */}}
{{- define "gpuslice.cardTerms" -}}
{{- range concat (list .Values.nodeLabel) (.Values.exporter.cardLabels | default list) | uniq }}
- matchExpressions: [{key: {{ . }}, operator: Exists}]
{{- end }}
{{- end }}

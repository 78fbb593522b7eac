{{- /* Written by tests/contract/test_chart_names.py from core/contract.py: lists of CEL. */}}
{{- define "gpuslice.podAnnotations" -}}
['ALIYUN_COM_GPU_MEM_IDX', 'ALIYUN_COM_GPU_MEM_POD', 'ALIYUN_COM_GPU_MEM_DEV', 'ALIYUN_COM_GPU_MEM_ASSUME_TIME', 'ALIYUN_COM_GPU_MEM_ASSIGNED', 'scheduler.framework.gpushare.allocation', 'gpushare.alibabacloud.com/core-percentage', 'gpuslice.io/visible-devices', 'gpuslice.io/meant-for', 'gpuslice.io/memory-granted', 'gpuslice.io/tiers', 'gpuslice.io/parked', 'gpuslice.io/traceparent']
{{- end }}

{{- define "gpuslice.podAnnotationsOfAgent" -}}
['ALIYUN_COM_GPU_MEM_IDX', 'ALIYUN_COM_GPU_MEM_POD', 'ALIYUN_COM_GPU_MEM_DEV', 'ALIYUN_COM_GPU_MEM_ASSUME_TIME', 'ALIYUN_COM_GPU_MEM_ASSIGNED', 'scheduler.framework.gpushare.allocation', 'gpushare.alibabacloud.com/core-percentage', 'gpuslice.io/visible-devices', 'gpuslice.io/meant-for', 'gpuslice.io/memory-granted', 'gpuslice.io/tiers', 'gpuslice.io/parked']
{{- end }}

{{- define "gpuslice.nodeAnnotationsOfAgent" -}}
['gpuslice.io/gpus', 'gpuslice.io/tier', 'gpuslice.io/links', 'gpuslice.io/kubelet-away', 'gpuslice.io/orphans']
{{- end }}

{{- define "gpuslice.nodeAmountsOfAgent" -}}
['aliyun.com/gpu-count', 'gpuslice.io/cards', 'aliyun.com/gpu-core.percentage', 'gpuslice.io/compute']
{{- end }}

{{- define "gpuslice.hidingPath" -}}
r'^/*(\./+)*(etc/+(\./+)*ld\.so\.preload|etc/+(\./+)*ld-nix\.so\.preload|usr/+(\./+)*lib/+(\./+)*gpuslice|etc/+(\./+)*gpuslice|var/+(\./+)*lib/+(\./+)*gpuslice|run/+(\./+)*gpuslice|lib/+(\./+)*gpuslice|var/+(\./+)*run/+(\./+)*gpuslice|proc/+(\./+)*(self|thread-self|[0-9]+))(/|$)|(^|/)\.\.(/|$)'
{{- end }}

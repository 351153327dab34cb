{{- define "jaxllm.name" -}}
{{ printf "%s" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}

{{- define "jaxllm.labels" -}}
app.kubernetes.io/name: jaxllm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

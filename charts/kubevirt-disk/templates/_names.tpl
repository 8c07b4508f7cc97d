{{- define "labels" -}}
app.kubernetes.io/name: kubevirt-disk-controller
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kubevirt-disk
{{- end }}
{{- define "selector" -}}
app.kubernetes.io/name: kubevirt-disk-controller
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- /* What the controller may do in the namespaces that it works in: templates/rbac.yaml says why. */}}
{{- define "rules" -}}
{{ .Files.Get "files/rules.yaml" }}
{{- end }}

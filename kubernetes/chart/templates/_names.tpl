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
{{- if not (has "pets" .Values.without) }}
# The set of a pet, and its pod. Anyone who may make StatefulSets can run any pod. So can anyone who
# may make VMPets or pods.
- apiGroups: [disk.kubevirt.io]
  resources: [vmidentitysets]
  verbs: [create, patch]
# A pet's objects block its deletion, for which some clusters ask this.
- apiGroups: [disk.kubevirt.io]
  resources: [vmpets/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [list, watch, create, patch]
{{- end }}
{{- if not (has "services" .Values.without) }}
# What serves a disk with attachment Service.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [list, watch, create, patch, delete]
{{- end }}
{{- if not (has "snapshots" .Values.without) }}
- apiGroups: [snapshot.storage.k8s.io]
  resources: [volumesnapshots]
  verbs: [list, watch, create]
{{- end }}
{{- if .Values.claims.fill }}
- apiGroups: [disk.kubevirt.io]
  resources: [vmimages]
  verbs: [list, watch]
- apiGroups: [disk.kubevirt.io]
  resources: [vmimages/status]
  verbs: [patch]
{{- end }}
{{- if or (not (has "snapshots" .Values.without)) (not (has "exports" .Values.without)) .Values.localDisks.move .Values.claims.fill }}
# Jobs write an image for population Snapshot, commit a disk to an image, move a disk of type Local, or
# fill a claim. What uses a Job owns it.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete{{ if not (has "snapshots" .Values.without) }}, patch{{ end }}]
{{- end }}
{{- end }}

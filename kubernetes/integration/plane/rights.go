package plane

// FillRights are the rights that the chart gives the account of the controller with claims.fill, as
// YAML.
func FillRights(namespace, account string) string {
	return `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: fill}
rules:
- {apiGroups: [disk.kubevirt.io], resources: [vmimages], verbs: [list, watch]}
- {apiGroups: [disk.kubevirt.io], resources: [vmimages/status], verbs: [patch]}
- {apiGroups: [""], resources: [persistentvolumes], verbs: [get, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: fill}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: fill}
subjects:
- {kind: ServiceAccount, name: ` + account + `, namespace: ` + namespace + `}
`
}

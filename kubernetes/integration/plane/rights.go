package plane

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Grant gives an account rights everywhere, until the test ends.
func (p *Plane) Grant(t testing.TB, name, namespace, account string, rules ...rbacv1.PolicyRule) {
	t.Helper()
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules}
	binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace,
			Name: account}}}
	for _, o := range []client.Object{role, binding} {
		require.NoError(t, p.Client.Create(t.Context(), o))
		t.Cleanup(func() { _ = p.Client.Delete(context.Background(), o) })
	}
}

// Allowed asks the API server whether an account may do something, such as `create jobs.batch`, or
// `get pods/log in NAMESPACE named NAME`.
func (p *Plane) Allowed(t testing.TB, namespace, account, what string) bool {
	t.Helper()
	what, name, _ := strings.Cut(what, " named ")
	what, in, _ := strings.Cut(what, " in ")
	verb, kind, _ := strings.Cut(what, " ")
	kind, subresource, _ := strings.Cut(kind, "/")
	if resource, group, found := strings.Cut(subresource, "."); found {
		kind, subresource = kind+"."+group, resource
	}
	resource, group, _ := strings.Cut(kind, ".")
	review := &authorizationv1.SubjectAccessReview{}
	review.Spec.User = "system:serviceaccount:" + namespace + ":" + account
	review.Spec.Groups = []string{"system:serviceaccounts", "system:authenticated",
		"system:serviceaccounts:" + namespace}
	review.Spec.ResourceAttributes = &authorizationv1.ResourceAttributes{Verb: verb, Group: group,
		Resource: resource, Subresource: subresource, Namespace: in, Name: name}
	require.NoError(t, p.Client.Create(t.Context(), review))
	return review.Status.Allowed
}

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

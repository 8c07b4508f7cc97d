// Package config has everything that a cluster needs from this product besides the controller: the
// CRDs, which `make generate` makes from the types in kubernetes/api, and the policies or webhooks
// that give new pods their disks.
package config

import (
	"embed"
	"strings"
)

// CRDs has the CustomResourceDefinitions as YAML, one in each file of directory crd.
//
//go:embed crd/*.yaml
var CRDs embed.FS

//go:embed policy.yaml
var policy string

//go:embed webhook.yaml
var webhook string

//go:embed annotations.yaml
var annotations string

// Policies returns the admission policies as YAML, for clusters with MutatingAdmissionPolicy. The
// server is the container image of kubevirt-disk that serves disks in pods.
func Policies(server string) string {
	return strings.ReplaceAll(policy, "SERVER_IMAGE", server) + "---\n" + annotations
}

// Webhooks returns the YAML that does the same in other clusters: the webhook configurations, the
// roles that the controller needs for them, and the policy for the annotations of our own objects.
func Webhooks(namespace, service, serviceAccount string) string {
	return strings.NewReplacer("SERVICE_ACCOUNT", serviceAccount, "NAMESPACE", namespace,
		"SERVICE", service).Replace(webhook) + "---\n" + annotations
}

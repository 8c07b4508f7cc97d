// Package config has what a cluster needs of this product besides the controller: the CRDs, made
// from the types in kubernetes/api by `make generate`, and what gives pods their disks when they
// are made.
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

// Policies returns the admission policies as YAML, for clusters with MutatingAdmissionPolicy. The
// server is the container image of kubevirt-disk that serves disks in pods.
func Policies(server string) string { return strings.ReplaceAll(policy, "SERVER_IMAGE", server) }

// Webhooks returns what does the same in other clusters as YAML: the webhook configurations, and
// the roles that the controller needs for them.
func Webhooks(namespace, service, serviceAccount string) string {
	return strings.NewReplacer("SERVICE_ACCOUNT", serviceAccount, "NAMESPACE", namespace,
		"SERVICE", service).Replace(webhook)
}

// Package config has what a cluster needs of this product besides the controller: the CRDs, made
// from the types in kubernetes/api by `make generate`.
package config

import "embed"

// CRDs has the CustomResourceDefinitions as YAML, one in each file of directory crd.
//
//go:embed crd/*.yaml
var CRDs embed.FS

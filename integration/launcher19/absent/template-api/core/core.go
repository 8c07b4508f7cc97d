// Package core stands for the API of KubeVirt's templates of machines, which is on no module proxy.
// No launcher uses it.
package core

// Names of the API.
const (
	GroupName            = "template.kubevirt.io"
	SingularResourceName = "virtualmachinetemplate"
	PluralResourceName   = "virtualmachinetemplates"
)

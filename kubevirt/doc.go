// Package kubevirt makes a disk that is served by NBD or vhost-user a disk of KubeVirt's virtual
// machines.
//
// A Server answers KubeVirt's launcher, which asks its hook sidecars and plugins for the domain of
// a machine before it is defined. Edit changes that domain: it adds the disks, or exchanges the
// source of an existing disk, according to annotations of the VirtualMachineInstance.
//
// The package knows neither the disks nor their server, and of Kubernetes only the data from the
// launcher.
package kubevirt

package claim

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"libvirt.org/go/libvirtxml"
)

// rbdDriver is the CSI driver of Ceph's block devices, which replaces Kubernetes' own RBD volumes.
const rbdDriver = "rbd.csi.ceph.com"

type rbdImage struct {
	monitors []string // HOST, HOST:PORT or [IPv6]:PORT
	pool     string
	name     string
	user     string // "": that of the options
	secret   *corev1.SecretReference
}

func fromRBD(v *corev1.RBDPersistentVolumeSource, namespace string) rbdImage {
	return rbdImage{monitors: v.CephMonitors, pool: cmp.Or(v.RBDPool, "rbd"), name: v.RBDImage,
		user: cmp.Or(v.RadosUser, "admin"), secret: inNamespace(v.SecretRef, namespace)}
}

// handlePattern is a volume handle of the CSI driver: its version, the length of the cluster's ID
// in hexadecimal digits, that ID, the pool's ID, and the UUID of the image.
var handlePattern = regexp.MustCompile(`^[0-9a-f]{4}-[0-9a-f]{4}-.+-[0-9a-f]{16}-` +
	`([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})$`)

// fromRBDDriver reads the attributes of the CSI driver's volumes. The names of the monitors are
// only in the driver's configuration.
func fromRBDDriver(v *corev1.CSIPersistentVolumeSource, monitors func(string) ([]string, error)) (
	rbdImage, error) {
	a := v.VolumeAttributes
	i := rbdImage{pool: a["pool"], name: a["imageName"], secret: v.NodeStageSecretRef}
	if a["staticVolume"] == "true" {
		i.name = v.VolumeHandle
	}
	if i.name == "" {
		m := handlePattern.FindStringSubmatch(v.VolumeHandle)
		if m == nil {
			return i, fmt.Errorf("its handle %q does not name an image", v.VolumeHandle)
		}
		i.name = cmp.Or(a["volumeNamePrefix"], "csi-vol-") + m[1]
	}
	if space := a["radosNamespace"]; space != "" {
		i.pool += "/" + space
	}
	var err error
	if i.monitors, err = monitors(a["clusterID"]); err != nil {
		return i, fmt.Errorf("the monitors of the Ceph cluster %q: %w", a["clusterID"], err)
	}
	return i, nil
}

func rbd(c *corev1.PersistentVolumeClaim, opt Options, i rbdImage) (source, error) {
	var wrong []error
	network := &libvirtxml.DomainDiskSourceNetwork{Protocol: "rbd", Name: i.pool + "/" + i.name}
	for _, m := range i.monitors {
		host, err := monitor(m)
		wrong = append(wrong, err)
		network.Hosts = append(network.Hosts, host)
	}
	if len(i.monitors) == 0 {
		wrong = append(wrong, errors.New("it has no monitors"))
	}
	if i.pool == "" || i.name == "" {
		wrong = append(wrong, fmt.Errorf("pool %q and image %q: want both", i.pool, i.name))
	}
	if strings.ContainsAny(network.Name, "@:") {
		wrong = append(wrong, fmt.Errorf("%q: want no '@' and no ':', by which QEMU would take "+
			"the rest for options", network.Name))
	}
	if i.secret == nil || i.secret.Name == "" {
		wrong = append(wrong, errors.New("it has no reference to a secret with the key of its "+
			"user"))
	}
	user := cmp.Or(i.user, opt.Username)
	if user == "" {
		wrong = append(wrong, errors.New("Options.Username is missing, which its secret has under "+
			"userID"))
	}
	if err := errors.Join(wrong...); err != nil {
		return source{}, refuse(c, Invalid, "its RBD volume cannot be used: %v", err)
	}
	return source{
		source: &libvirtxml.DomainDiskSource{Network: network},
		auth: &libvirtxml.DomainDiskAuth{Username: user,
			Secret: &libvirtxml.DomainDiskSecret{Type: "ceph", Usage: opt.usage(*i.secret)}},
	}, nil
}

// monitor reads the address of a monitor. Without a port, Ceph's own default is used.
func monitor(text string) (libvirtxml.DomainDiskSourceHost, error) {
	host, port := text, ""
	if h, p, err := net.SplitHostPort(text); err == nil {
		host, port = h, p
	}
	host = strings.Trim(host, "[]")
	if host == "" || strings.ContainsAny(host, " /,;@") {
		return libvirtxml.DomainDiskSourceHost{}, fmt.Errorf("%q is not the address of a monitor: "+
			"want HOST or HOST:PORT", text)
	}
	return libvirtxml.DomainDiskSourceHost{Name: host, Port: port}, nil
}

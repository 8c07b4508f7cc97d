package claim

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/libvirt"
)

// iscsiDriver is the CSI driver that replaces Kubernetes' own iSCSI volumes.
const iscsiDriver = "iscsi.csi.k8s.io"

// iscsiTarget is the LUN of a volume.
type iscsiTarget struct {
	portals   []string // HOST, HOST:PORT or [IPv6]:PORT, the preferred one first
	name      string   // of the target
	lun       int
	initiator string // "": QEMU's own
	chap      bool
	secret    *corev1.SecretReference
}

func fromISCSI(v *corev1.ISCSIPersistentVolumeSource, namespace string) iscsiTarget {
	t := iscsiTarget{portals: []string{v.TargetPortal}, name: v.IQN, lun: int(v.Lun),
		chap: v.SessionCHAPAuth}
	t.add(v.Portals)
	if v.InitiatorName != nil {
		t.initiator = *v.InitiatorName
	}
	t.secret = inNamespace(v.SecretRef, namespace)
	return t
}

// fromISCSIDriver reads the attributes of the CSI driver's volumes.
func fromISCSIDriver(v *corev1.CSIPersistentVolumeSource) (iscsiTarget, error) {
	a := v.VolumeAttributes
	t := iscsiTarget{portals: []string{a["targetPortal"]}, name: a["iqn"],
		initiator: a["initiatorName"], chap: a["sessionCHAPAuth"] == "true"}
	if a["secret"] != "" {
		return t, errors.New("its attribute \"secret\" has credentials in the open: use " +
			"nodeStageSecretRef or nodePublishSecretRef")
	}
	lun, err := strconv.Atoi(a["lun"])
	if err != nil {
		return t, fmt.Errorf("its attribute \"lun\" is %q: want a number", a["lun"])
	}
	t.lun = lun
	var more []string
	if a["portals"] != "" {
		if err := json.Unmarshal([]byte(a["portals"]), &more); err != nil {
			return t, fmt.Errorf("its attribute \"portals\" is not a JSON list of addresses: %w",
				err)
		}
	}
	t.add(more)
	t.secret = cmp.Or(v.NodeStageSecretRef, v.NodePublishSecretRef)
	return t, nil
}

func (t *iscsiTarget) add(portals []string) {
	for _, p := range portals {
		if !slices.Contains(t.portals, p) {
			t.portals = append(t.portals, p)
		}
	}
}

// iscsi is QEMU's source for a LUN. LUN 0 is allowed, because other targets have it.
func iscsi(c *corev1.PersistentVolumeClaim, opt Options, t iscsiTarget) (source, error) {
	var wrong []error
	network := &libvirtxml.DomainDiskSourceNetwork{Protocol: "iscsi"}
	for _, text := range t.portals {
		portal, err := libvirt.ParsePortal(text)
		if err != nil {
			wrong = append(wrong, err)
			continue
		}
		network.Hosts = append(network.Hosts, libvirtxml.DomainDiskSourceHost{Name: portal.Host,
			Port: strconv.Itoa(int(cmp.Or(portal.Port, libvirt.DefaultPort)))})
	}
	// Other targets have names with capitals, and accept no other spelling.
	wrong = append(wrong, libvirt.CheckName(strings.ToLower(t.name)))
	if t.lun < 0 || t.lun > libvirt.MaxLUN {
		wrong = append(wrong, fmt.Errorf("%d is not a LUN: want 0 to %d", t.lun, libvirt.MaxLUN))
	}
	network.Name = libvirt.SourceName(t.name, t.lun)
	if initiator := cmp.Or(opt.Device.Initiator, t.initiator); initiator != "" {
		wrong = append(wrong, libvirt.CheckName(strings.ToLower(initiator)))
		network.Initiator = &libvirtxml.DomainDiskSourceNetworkInitiator{
			IQN: &libvirtxml.DomainDiskSourceNetworkIQN{Name: initiator}}
	}
	src := source{source: &libvirtxml.DomainDiskSource{Network: network}}
	if t.chap {
		switch {
		case t.secret == nil || t.secret.Name == "":
			wrong = append(wrong, errors.New("it uses CHAP, but has no reference to a secret"))
		case opt.Username == "":
			wrong = append(wrong, fmt.Errorf("it uses CHAP: Options.Username is missing, which "+
				"the secret %s/%s has", t.secret.Namespace, t.secret.Name))
		default:
			src.auth = &libvirtxml.DomainDiskAuth{Username: opt.Username,
				Secret: &libvirtxml.DomainDiskSecret{Type: "iscsi", Usage: opt.usage(*t.secret)}}
		}
	}
	if err := errors.Join(wrong...); err != nil {
		return source{}, refuse(c, Invalid, "its iSCSI volume cannot be used: %v", err)
	}
	return src, nil
}

// inNamespace completes a reference of Kubernetes' own volumes: without a namespace, the secret is
// in the namespace of the claim.
func inNamespace(ref *corev1.SecretReference, namespace string) *corev1.SecretReference {
	if ref == nil {
		return nil
	}
	return &corev1.SecretReference{Name: ref.Name, Namespace: cmp.Or(ref.Namespace, namespace)}
}

// usage names the libvirt secret for a Kubernetes secret. libvirt allows no slash in it.
func (opt Options) usage(ref corev1.SecretReference) string {
	if opt.SecretUsage != nil {
		return opt.SecretUsage(ref)
	}
	return ref.Namespace + "." + ref.Name
}

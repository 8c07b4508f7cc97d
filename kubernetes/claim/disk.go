package claim

import (
	"errors"
	"fmt"
	"path"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/libvirt"
)

// Options describe the use of a claim by a VM.
type Options struct {
	Device   libvirt.Device
	ReadOnly bool // the VM only reads; implied if the claim can only be read

	// Pods are the pods of the claim's namespace, and Pod is the UID of QEMU's pod. A claim for one
	// writer is refused while another of the pods uses it.
	Pods []corev1.Pod
	Pod  types.UID

	// Path is the path of the claim in QEMU's mount namespace: the block device, or the mount point
	// of its file system. "": the claim is not mounted.
	Path string

	// Username is the user of a volume with a secret: node.session.auth.username of the secret for
	// iSCSI with CHAP, userID for Ceph's CSI driver.
	Username string
	// SecretUsage names the libvirt secret for a Kubernetes secret. nil: NAMESPACE.NAME. The caller
	// defines the libvirt secret with the value of node.session.auth.password, or with the key of
	// the Ceph user.
	SecretUsage func(corev1.SecretReference) string
	// Monitors returns the monitors of a Ceph cluster, HOST or HOST:PORT, by the cluster's ID in
	// the volumes of the CSI driver. nil: volumes of that driver are refused unless Path is given.
	Monitors func(clusterID string) ([]string, error)
}

// Disk returns the <disk> element of a claim. volume is the volume that the claim is bound to. The
// claim's access modes decide who may use the disk: with ReadWriteMany it is shareable, with
// ReadOnlyMany alone it is shareable and read-only, and with ReadWriteOnce or ReadWriteOncePod no
// other pod may use it.
func Disk(c *corev1.PersistentVolumeClaim, volume *corev1.PersistentVolume, opt Options) (
	*libvirtxml.DomainDisk, error) {
	if err := checkBound(c, volume); err != nil {
		return nil, err
	}
	access, err := accessOf(c, opt)
	if err != nil {
		return nil, err
	}
	src, err := sourceOf(c, volume, opt)
	if err != nil {
		return nil, err
	}
	access.ReadOnly = access.ReadOnly || readOnly(&volume.Spec)
	access.Source, access.Auth = src.source, src.auth
	disk, err := opt.Device.Disk(access)
	if err != nil {
		return nil, refuse(c, Invalid, "%v", err)
	}
	return disk, nil
}

// checkBound refuses a volume that is not the claim's. The UID distinguishes a claim from an
// earlier one with the same name, whose data the volume may hold.
func checkBound(c *corev1.PersistentVolumeClaim, volume *corev1.PersistentVolume) error {
	switch {
	case c.Status.Phase == corev1.ClaimLost:
		return refuse(c, NotBound, "its volume %q is lost: restore the volume, or use another "+
			"claim", c.Spec.VolumeName)
	case c.Status.Phase != corev1.ClaimBound || c.Spec.VolumeName == "":
		return refuse(c, NotBound, "it is not bound to a volume yet: wait, or look at its events")
	case c.DeletionTimestamp != nil:
		return refuse(c, NotBound, "it is being deleted: use another claim")
	case volume.Name != c.Spec.VolumeName:
		return refuse(c, OtherVolume, "it is bound to the volume %q, not to %q",
			c.Spec.VolumeName, volume.Name)
	}
	ref := volume.Spec.ClaimRef
	switch {
	case ref == nil || ref.Namespace != c.Namespace || ref.Name != c.Name:
		return refuse(c, OtherVolume, "its volume %q is not bound to it", volume.Name)
	case ref.UID != c.UID:
		return refuse(c, OtherVolume, "its volume %q is bound to an earlier claim of that name",
			volume.Name)
	}
	return nil
}

// accessOf returns the access that the disk gives to other machines.
func accessOf(c *corev1.PersistentVolumeClaim, opt Options) (libvirt.Storage, error) {
	modes := c.Status.AccessModes
	if len(modes) == 0 {
		modes = c.Spec.AccessModes
	}
	has := func(mode corev1.PersistentVolumeAccessMode) bool { return slices.Contains(modes, mode) }
	switch {
	case has(corev1.ReadWriteMany):
		mode := libvirt.WriteShared
		if opt.ReadOnly {
			mode = libvirt.ReadShared
		}
		return libvirt.Storage{AccessMode: mode, ReadOnly: opt.ReadOnly}, nil
	case has(corev1.ReadOnlyMany) && (opt.ReadOnly || len(modes) == 1):
		return libvirt.Storage{AccessMode: libvirt.ReadShared, ReadOnly: true}, nil
	case has(corev1.ReadWriteOnce) || has(corev1.ReadWriteOncePod):
		if user := userOf(c, opt); user != "" {
			return libvirt.Storage{}, refuse(c, InUse, "the pod %q uses it, and it is for one "+
				"writer: wait until that pod has ended", user)
		}
		return libvirt.Storage{AccessMode: libvirt.WriteExclusive, ReadOnly: opt.ReadOnly}, nil
	}
	return libvirt.Storage{}, refuse(c, Invalid, "its access modes %v are not known", modes)
}

// userOf is the name of another pod that may write to a claim, or "". A pod that has ended does not
// count, but one that is being deleted does.
func userOf(c *corev1.PersistentVolumeClaim, opt Options) string {
	for _, pod := range opt.Pods {
		if pod.Namespace != c.Namespace || pod.UID == opt.Pod ||
			pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		for _, v := range pod.Spec.Volumes {
			direct := v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == c.Name
			// The claim of a generic ephemeral volume is named after its pod and the volume.
			ephemeral := v.Ephemeral != nil && pod.Name+"-"+v.Name == c.Name
			if direct || ephemeral {
				return pod.Name
			}
		}
	}
	return ""
}

// source is the object that QEMU opens.
type source struct {
	source *libvirtxml.DomainDiskSource
	auth   *libvirtxml.DomainDiskAuth
}

// readOnly reports whether a volume may not be written by anybody. If it is mounted, QEMU could not
// open it for writing anyway.
func readOnly(v *corev1.PersistentVolumeSpec) bool {
	return v.ISCSI != nil && v.ISCSI.ReadOnly || v.RBD != nil && v.RBD.ReadOnly ||
		v.CSI != nil && v.CSI.ReadOnly || v.NFS != nil && v.NFS.ReadOnly
}

// diskName is the file of the disk on a claim with a file system.
const diskName = "disk.img"

// sourceOf finds the object that QEMU opens. A volume with a file system is always used by its
// file: the device beneath would show the guest a file system instead of the disk.
func sourceOf(c *corev1.PersistentVolumeClaim, volume *corev1.PersistentVolume, opt Options) (
	source, error) {
	mode := volume.Spec.VolumeMode
	if mode == nil || *mode == corev1.PersistentVolumeFilesystem {
		if opt.Path == "" {
			return source{}, refuse(c, Invalid, "its volume has a file system, with the disk in "+
				"the file %s: mount the claim into the pod, or serve it with kubevirt-disk "+
				"(serve --persistent-dir)", diskName)
		}
		return source{source: &libvirtxml.DomainDiskSource{
			File: &libvirtxml.DomainDiskSourceFile{File: path.Join(opt.Path, diskName)}}}, nil
	}
	src, err := direct(c, volume, opt)
	var unsupported *Error
	if opt.Path != "" && errors.As(err, &unsupported) && unsupported.Reason == NoDirect {
		return source{source: &libvirtxml.DomainDiskSource{
			Block: &libvirtxml.DomainDiskSourceBlock{Dev: opt.Path}}}, nil
	}
	return src, err
}

// direct finds the network device of a block volume.
func direct(c *corev1.PersistentVolumeClaim, volume *corev1.PersistentVolume, opt Options) (
	source, error) {
	v := volume.Spec.PersistentVolumeSource
	switch {
	case v.ISCSI != nil:
		return iscsi(c, opt, fromISCSI(v.ISCSI, c.Namespace))
	case v.RBD != nil:
		return rbd(c, opt, fromRBD(v.RBD, c.Namespace))
	case v.CSI != nil && v.CSI.Driver == iscsiDriver:
		t, err := fromISCSIDriver(v.CSI)
		if err != nil {
			return source{}, refuse(c, Invalid, "its volume %q: %v", volume.Name, err)
		}
		return iscsi(c, opt, t)
	case v.CSI != nil && v.CSI.Driver == rbdDriver:
		if opt.Monitors == nil || v.CSI.VolumeAttributes["encrypted"] == "true" {
			break // QEMU does not know the driver's encryption
		}
		i, err := fromRBDDriver(v.CSI, opt.Monitors)
		if err != nil {
			return source{}, refuse(c, Invalid, "its volume %q: %v", volume.Name, err)
		}
		return rbd(c, opt, i)
	}
	kind := kindOf(&v)
	err := refuse(c, NoDirect, "QEMU cannot use a volume of %s by itself: serve the claim with "+
		"kubevirt-disk and use its LUN, or mount the claim into the pod", kind)
	err.Driver = kind
	return source{}, err
}

// kindOf names the kind of a volume for people: its CSI driver, or the field of the volume.
func kindOf(v *corev1.PersistentVolumeSource) string {
	switch {
	case v.CSI != nil:
		return fmt.Sprintf("the CSI driver %q", v.CSI.Driver)
	case v.NFS != nil:
		return "NFS"
	case v.HostPath != nil:
		return "a host path"
	case v.Local != nil:
		return "a local device"
	case v.FC != nil:
		return "Fibre Channel"
	}
	return "this kind"
}

package v1alpha1

import (
	"fmt"
	"strings"
)

// Group is the API group of this package.
const Group = "disk.kubevirt.io"

// Annotations of a pod. The second name of each pair is from proposal 004. For the further disks of
// a machine of KubeVirt, those of AnnotationSet, AnnotationName, AnnotationSize,
// AnnotationBlockSize and AnnotationDisk have numbers: see Numbered.
const (
	// AnnotationSet names the VMIdentitySet that describes the pod's disk.
	AnnotationSet       = Group + "/identity-set"
	AnnotationSetLegacy = "VirtletVMIdentitySet"
	// AnnotationName names the VMIdentity. Without it, the identity has the name of the pod.
	AnnotationName       = Group + "/identity-name"
	AnnotationNameLegacy = "VirtletVMIdentityName"
	// AnnotationFirmwareUUID is the SMBIOS UUID of the pod's machine. The controller sets it before
	// the pod is scheduled, and containers read it through the downward API.
	AnnotationFirmwareUUID = Group + "/firmware-uuid"
	// AnnotationSize is the size of the pod's disk in bytes. The controller takes it from the
	// identity before the pod is scheduled, so that the disk is never asked to shrink.
	AnnotationSize = Group + "/size"
	// AnnotationBlockSize is the length of the logical blocks of the pod's disk in bytes. The
	// controller takes it from the identity, as the size.
	AnnotationBlockSize = Group + "/block-size"
	// AnnotationDisk is the URI of a disk with attachment Service, for the hook sidecar of a
	// machine of KubeVirt. The controller sets it before the pod is scheduled.
	AnnotationDisk = Group + "/disk"
)

// MaxDisks is how many disks a machine of KubeVirt has at most. Other pods have one.
const MaxDisks = 10

// Numbered is the name of an annotation, a label or a gate for one of the disks of a machine of
// KubeVirt. Number 0, which all pods with a disk have, is without a number.
func Numbered(name string, disk int) string {
	if disk == 0 {
		return name
	}
	return fmt.Sprintf("%s.%d", name, disk)
}

// AnnotationContent is on the claim of a VMIdentity: what its disk was made from. By it, a claim
// that a backup has restored is known.
const AnnotationContent = Group + "/content"

// Content is the value of AnnotationContent.
func (s *DiskSpec) Content() string {
	content := string(Overlay) + " " + s.Image
	if s.Source != nil {
		content = strings.TrimSpace("Source " + s.Source.String() + " " + s.Image)
	} else if s.Population == Snapshot {
		content = string(Snapshot) + " " + s.Image
	}
	if block := s.Block(); block != sector { // as earlier versions say it of the others
		content += fmt.Sprintf(" blocks %d", block)
	}
	return content
}

// sector is the length of a logical block in bytes where nothing else is said.
const sector = 512

// FromAddress reports whether the image is a file on a web server.
func (s *DiskSpec) FromAddress() bool {
	return strings.HasPrefix(s.Image, "https://") || strings.HasPrefix(s.Image, "http://")
}

// Block is the length of the disk's logical blocks in bytes.
func (s *DiskSpec) Block() int64 { return max(int64(s.BlockSize), sector) }

// Bytes is the size of the disk in bytes, in whole logical blocks. 0: that of its image.
func (s *DiskSpec) Bytes() int64 {
	if s.Size == nil {
		return 0
	}
	block := s.Block()
	return (s.Size.Value() + block - 1) / block * block
}

const (
	// Gate is the scheduling gate that holds a pod until its identity is ready. There is one for
	// each disk: see Numbered.
	Gate = Group + "/identity"
	// LabelIdentity is on a pod, and on all objects of an identity: the name of the VMIdentity.
	LabelIdentity = Group + "/identity"
	// LabelSet is on a VMIdentity and on a pod: the name of the VMIdentitySet.
	LabelSet = Group + "/identity-set"
	// LabelSeveral is on a pod with several disks. Those after the first have labels with their
	// numbers: see Numbered.
	LabelSeveral = Group + "/several"
	// LabelPet is on all objects of a VMPet, and on its pod: the name of the VMPet.
	LabelPet = Group + "/pet"
	// LabelExport is on a Job that commits a disk to an image, and on its pods: the name of the
	// Job.
	LabelExport = Group + "/export"
	// LabelSignaturePolicy is on a namespace: the policy that says whose signatures the images of
	// its identities must have. Only the administrator of the cluster can set it.
	LabelSignaturePolicy = Group + "/signature-policy"
	// LabelServer is on the pod that serves the disk of an identity with attachment Service: the
	// name of the VMIdentity. No machine runs in this pod.
	LabelServer = Group + "/server"
	// Finalizer holds a VMIdentity until no pod uses its claim.
	Finalizer = Group + "/claim"
	// FinalizerDisk holds the claim of a VMIdentity until the disk may go. Kubernetes deletes the
	// claim before its owner if somebody deletes the VMIdentity with --cascade=foreground.
	FinalizerDisk = Group + "/disk"
	// FinalizerService holds a VMIdentity until its disk is no longer served.
	FinalizerService = Group + "/service"
	// FinalizerSnapshot holds a VMIdentitySnapshot until no disk is being made from it.
	FinalizerSnapshot = Group + "/snapshot"
	// FinalizerMove holds a VMIdentity until the objects that move its disk are gone.
	FinalizerMove = Group + "/move"
	// FieldManager owns the fields that the controller applies.
	FieldManager = "kubevirt-disk-controller"
)

// AnnotationMoveTo is on a VMIdentity of type Local: the node that its disk should be on.
const AnnotationMoveTo = Group + "/move-to"

// AnnotationOwner is on what a VMIdentity needs besides its claim: the UID of the VMIdentity. These
// objects have no ownerReference. Kubernetes would delete them under a running machine if somebody
// deletes the VMIdentity with --cascade=foreground.
const AnnotationOwner = Group + "/owner"

// Annotations of a VMIdentity with attachment Service.
const (
	// AnnotationVolumeClaim asks for a block PersistentVolume of type iscsi: nodes then log in to
	// the disk. The value is the name of its claim.
	AnnotationVolumeClaim = Group + "/volume-claim"
	// AnnotationVolumeAccess is the access mode of that volume. Without it: ReadWriteOncePod.
	AnnotationVolumeAccess = Group + "/volume-access"
	// AnnotationHandoverTo lets a second initiator use the disk too, for a live migration. The
	// value is the initiator's name.
	AnnotationHandoverTo = Group + "/handover-to"
	// AnnotationHandoverStep ends a handover: finish makes the second initiator the owner and
	// fences the first, cancel fences the second.
	AnnotationHandoverStep = Group + "/handover-step"
)

// AnnotationHandoverRequest is on the pod that serves a disk. It has the step of a handover that
// the daemon should take, as JSON. The controller sets it.
const AnnotationHandoverRequest = Group + "/handover"

// The container of a pod that serves the disk, and the disk's device in the machine.
const (
	Device        = "vda"
	DiskContainer = "disk-" + Device
)

// prefix keeps the names of claims and secrets apart from names that users choose.
const prefix = "vmid-"

// MaxNameLength is the longest name of a VMIdentity, in bytes: the name is the value of a label,
// with room for the prefix of the names below.
const MaxNameLength = 63 - len(prefix)

// ClaimName is the name of the claim of a VMIdentity.
func ClaimName(identity string) string { return prefix + identity }

// SecretName is the name of the secret with the CHAP credential of a VMIdentity. The secret has
// the type kubernetes.io/iscsi-chap and the keys that kubevirt.io:disk reads.
func SecretName(identity string) string { return prefix + identity }

// VolumeSnapshotName is the name of the VolumeSnapshot of a VMIdentitySnapshot.
func VolumeSnapshotName(snapshot string) string { return "vmsnap-" + snapshot }

// NBDSecretName is the name of the secret with the certificates for NBD of a VMIdentity with
// attachment Service. It has the type kubernetes.io/tls and the keys below.
func NBDSecretName(identity string) string { return "vmnbd-" + identity }

// The keys of that secret besides those of its type, which are the server's.
const (
	KeyAuthority  = "ca.crt"
	KeyClientCert = "client.crt"
	KeyClientKey  = "client.key"
)

// PortNBD is the port of a Service for NBD.
const PortNBD = 10809

// DiskURI is where a hook sidecar finds a disk that is served at a host: by its LUN, because the
// name of the export is that of a file in the image.
func DiskURI(host string) string { return fmt.Sprintf("nbds://%s:%d/1", host, PortNBD) }

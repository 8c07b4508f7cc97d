package claim_test

import (
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/claim"
	"kubevirt.io/disk/libvirt"
)

// bound is a claim with its block volume.
func bound(src corev1.PersistentVolumeSource, modes ...corev1.PersistentVolumeAccessMode) (
	*corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "vms", Name: "data", UID: "1"},
		Spec:       corev1.PersistentVolumeClaimSpec{VolumeName: "pv"},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound,
			AccessModes: modes},
	}
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"},
		Spec: corev1.PersistentVolumeSpec{PersistentVolumeSource: src,
			VolumeMode: new(corev1.PersistentVolumeBlock),
			ClaimRef:   &corev1.ObjectReference{Namespace: "vms", Name: "data", UID: "1"}}}
	return c, v
}

func inTree() corev1.PersistentVolumeSource {
	return corev1.PersistentVolumeSource{ISCSI: &corev1.ISCSIPersistentVolumeSource{
		TargetPortal: "10.0.0.5:3261", Portals: []string{"[2001:db8::5]", "10.0.0.5:3261"},
		IQN: "iqn.2017-01.io.kubevirt:disk", Lun: 300, SessionCHAPAuth: true,
		SecretRef: &corev1.SecretReference{Name: "chap"}}}
}

func driver(name, handle string, attributes map[string]string) corev1.PersistentVolumeSource {
	return corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: name,
		VolumeHandle: handle, VolumeAttributes: attributes,
		NodeStageSecretRef: &corev1.SecretReference{Namespace: "ceph", Name: "key"}}}
}

func iscsiDriver(change map[string]string) corev1.PersistentVolumeSource {
	all := map[string]string{"targetPortal": "target.example.com", "lun": "0",
		"iqn": "iqn.2017-01.io.kubevirt:disk", "portals": `["10.0.0.6"]`}
	maps.Copy(all, change)
	return driver("iscsi.csi.k8s.io", "h", all)
}

func encrypted() corev1.PersistentVolumeSource {
	return driver("rbd.csi.ceph.com", "x", map[string]string{"encrypted": "true"})
}

const rwo, rwx, rox = corev1.ReadWriteOnce, corev1.ReadWriteMany, corev1.ReadOnlyMany

func render(t *testing.T, src corev1.PersistentVolumeSource, opt claim.Options,
	modes ...corev1.PersistentVolumeAccessMode) string {
	t.Helper()
	c, v := bound(src, modes...)
	return testtool.Must(testtool.Must(claim.Disk(c, v, opt))(t).Marshal())(t)
}

func TestISCSI(t *testing.T) {
	got := render(t, inTree(), claim.Options{Username: "vm",
		Device: libvirt.Device{Dev: "sda", Initiator: "iqn.2017-01.io.kubevirt:vm"}}, rwo)
	require.Equal(t, strings.TrimSpace(`
<disk type="network" device="disk">
  <driver name="qemu" type="raw" cache="none" discard="unmap"></driver>
  <auth username="vm">
    <secret type="iscsi" usage="vms.chap"></secret>
  </auth>
  <source protocol="iscsi" name="iqn.2017-01.io.kubevirt:disk/16684">
    <host name="10.0.0.5" port="3261"></host>
    <host name="2001:db8::5" port="3260"></host>
    <initiator>
      <iqn name="iqn.2017-01.io.kubevirt:vm"></iqn>
    </initiator>
  </source>
  <target dev="sda" bus="scsi"></target>
</disk>`), got)

	got = render(t, iscsiDriver(nil), claim.Options{}, rwx)
	require.Contains(t, got, `name="iqn.2017-01.io.kubevirt:disk/0"`, "LUN 0 is one")
	require.Contains(t, got, `<host name="target.example.com" port="3260">`)
	require.Contains(t, got, `<host name="10.0.0.6" port="3260">`)
	require.Contains(t, got, "<shareable>")
	require.NotContains(t, got, "<auth")

	named := inTree()
	named.ISCSI.InitiatorName = new("iqn.2017-01.io.kubevirt:node")
	named.ISCSI.IQN = "iqn.2000-01.com.example:NAS.Target-1"
	named.ISCSI.SecretRef.Namespace = "other"
	named.ISCSI.ReadOnly = true
	got = render(t, named, claim.Options{Username: "vm", SecretUsage: func(
		ref corev1.SecretReference) string {
		return "usage-of-" + ref.Namespace + "-" + ref.Name
	}}, rwo)
	require.Contains(t, got, `<iqn name="iqn.2017-01.io.kubevirt:node">`)
	require.Contains(t, got, `name="iqn.2000-01.com.example:NAS.Target-1/16684"`)
	require.Contains(t, got, `usage="usage-of-other-chap"`)
	require.Contains(t, got, "<readonly>")
}

func TestRBD(t *testing.T) {
	old := corev1.PersistentVolumeSource{RBD: &corev1.RBDPersistentVolumeSource{
		CephMonitors: []string{"10.0.0.1:6789", "[2001:db8::1]:6789", "mon"}, RBDImage: "disk",
		SecretRef: &corev1.SecretReference{Name: "key"}}}
	got := render(t, old, claim.Options{}, rwo)
	for _, want := range []string{`<source protocol="rbd" name="rbd/disk">`,
		`<host name="10.0.0.1" port="6789">`, `<host name="2001:db8::1" port="6789">`,
		`<host name="mon">`, `<auth username="admin">`, `<secret type="ceph" usage="vms.key">`} {
		require.Contains(t, got, want)
	}

	const uuid = "6e696bba-064f-11ec-a251-0242ac110002"
	const handle = "0001-0024-7635de36-ab1f-4a70-98a2-a1bd80ba77c4-0000000000000006-" + uuid
	monitors := func(id string) ([]string, error) {
		if id != "c" {
			return nil, errors.New("unknown cluster")
		}
		return []string{"10.0.0.1"}, nil
	}
	opt := claim.Options{Username: "k8s", Monitors: monitors}
	attributes := map[string]string{"clusterID": "c", "pool": "p"}
	got = render(t, driver("rbd.csi.ceph.com", handle, attributes), opt, rwo)
	require.Contains(t, got, `name="p/csi-vol-`+uuid+`"`)
	require.Contains(t, got, `<auth username="k8s">`)
	require.Contains(t, got, `usage="ceph.key"`)
	attributes["imageName"], attributes["radosNamespace"] = "csi-vol-7", "space"
	got = render(t, driver("rbd.csi.ceph.com", handle, attributes), opt, rwo)
	require.Contains(t, got, `name="p/space/csi-vol-7"`)
	attributes["staticVolume"] = "true"
	got = render(t, driver("rbd.csi.ceph.com", "static", attributes), opt, rwo)
	require.Contains(t, got, `name="p/space/static"`)
}

// A volume with a file system has the disk in a file, whatever device is beneath.
func TestMounted(t *testing.T) {
	c, v := bound(inTree(), rwo)
	v.Spec.VolumeMode = nil
	_, err := claim.Disk(c, v, claim.Options{Username: "vm"})
	require.ErrorContains(t, err, "its volume has a file system, with the disk in the file "+
		"disk.img")
	disk := testtool.Must(claim.Disk(c, v, claim.Options{Path: "/claims/data"}))(t)
	require.Equal(t, "/claims/data/disk.img", disk.Source.File.File)

	other := driver("ebs.csi.aws.com", "vol-1", nil)
	got := render(t, other, claim.Options{Path: "/dev/data"}, rwo)
	require.Contains(t, got, `<disk type="block"`)
	require.Contains(t, got, `<source dev="/dev/data">`)
	require.NotContains(t, got, "<readonly>")
	got = render(t, encrypted(), claim.Options{Path: "/dev/data", Monitors: func(string) ([]string,
		error) {
		return nil, nil
	}}, rwo)
	require.Contains(t, got, `<source dev="/dev/data">`)
	other.CSI.ReadOnly = true
	require.Contains(t, render(t, other, claim.Options{Path: "/dev/data"}, rwo), "<readonly>")
	require.Error(t, testtool.Err(claim.Disk(c, v, claim.Options{})))
}

func TestAccessModes(t *testing.T) {
	plain := iscsiDriver(nil)
	for _, one := range []struct {
		modes               []corev1.PersistentVolumeAccessMode
		asked               bool
		shareable, readOnly bool
	}{
		{modes: []corev1.PersistentVolumeAccessMode{rwo}},
		{modes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}},
		{modes: []corev1.PersistentVolumeAccessMode{rwo}, asked: true, readOnly: true},
		{modes: []corev1.PersistentVolumeAccessMode{rwo, rwx}, shareable: true},
		{modes: []corev1.PersistentVolumeAccessMode{rwx}, asked: true, shareable: true,
			readOnly: true},
		{modes: []corev1.PersistentVolumeAccessMode{rox}, shareable: true, readOnly: true},
		{modes: []corev1.PersistentVolumeAccessMode{rwo, rox}},
		{modes: []corev1.PersistentVolumeAccessMode{rwo, rox}, asked: true, shareable: true,
			readOnly: true},
	} {
		got := render(t, plain, claim.Options{ReadOnly: one.asked}, one.modes...)
		require.Equal(t, one.shareable, strings.Contains(got, "<shareable>"), one)
		require.Equal(t, one.readOnly, strings.Contains(got, "<readonly>"), one)
	}
}

func TestInUse(t *testing.T) {
	pod := func(change func(*corev1.Pod)) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "vms", Name: "other", UID: "9"},
			Spec: corev1.PodSpec{Volumes: []corev1.Volume{{Name: "x",
				VolumeSource: corev1.VolumeSource{
					PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
						ClaimName: "data"}}}}}}
		change(&p)
		return p
	}
	ephemeral := func(p *corev1.Pod) {
		p.Name = "da"
		p.Spec.Volumes = []corev1.Volume{{Name: "ta", VolumeSource: corev1.VolumeSource{
			Ephemeral: &corev1.EphemeralVolumeSource{}}}}
	}
	c, v := bound(iscsiDriver(nil), rwo)
	try := func(change func(*corev1.Pod)) error {
		_, err := claim.Disk(c, v, claim.Options{Pod: "1", Pods: []corev1.Pod{pod(change)}})
		return err
	}
	require.ErrorContains(t, try(func(*corev1.Pod) {}), `claim vms/data: the pod "other" uses it`)
	require.Error(t, try(func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }))
	require.NoError(t, try(ephemeral), "that is the claim da-ta")
	c.Name, v.Spec.ClaimRef.Name = "da-ta", "da-ta"
	require.ErrorContains(t, try(ephemeral), `the pod "da" uses it`)
	c.Name, v.Spec.ClaimRef.Name = "data", "data"
	for _, free := range []func(*corev1.Pod){
		func(p *corev1.Pod) { p.UID = "1" },
		func(p *corev1.Pod) { p.Namespace = "elsewhere" },
		func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded },
		func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed },
		func(p *corev1.Pod) { p.Spec.Volumes[0].PersistentVolumeClaim.ClaimName = "x" },
	} {
		require.NoError(t, try(free))
	}
	c.Status.AccessModes = []corev1.PersistentVolumeAccessMode{rwx}
	require.NoError(t, try(func(*corev1.Pod) {}))
}

func TestRefusals(t *testing.T) {
	type change = func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume)
	set := func(f func(*corev1.PersistentVolumeSource)) change {
		return func(_ *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) {
			f(&v.Spec.PersistentVolumeSource)
		}
	}
	replace := func(src corev1.PersistentVolumeSource) change {
		return set(func(v *corev1.PersistentVolumeSource) { *v = src })
	}
	for want, one := range map[string]struct {
		reason claim.Reason
		change change
	}{
		"it is not bound to a volume yet": {claim.NotBound,
			func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
				c.Status.Phase = corev1.ClaimPending
			}},
		`its volume "pv" is lost`: {claim.NotBound,
			func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
				c.Status.Phase = corev1.ClaimLost
			}},
		"it is being deleted": {claim.NotBound,
			func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
				c.DeletionTimestamp = &metav1.Time{}
			}},
		`not to "other"`: {claim.OtherVolume,
			func(_ *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) { v.Name = "other" }},
		"is not bound to it": {claim.OtherVolume,
			func(_ *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) {
				v.Spec.ClaimRef = nil
			}},
		"bound to an earlier claim": {claim.OtherVolume,
			func(_ *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) {
				v.Spec.ClaimRef.UID = "0"
			}},
		"its access modes [] are not known": {claim.Invalid,
			func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
				c.Status.AccessModes = nil
			}},
		`volume of the CSI driver "x" by itself: serve the claim with kubevirt-disk`: {
			claim.NoDirect, replace(driver("x", "h", nil))},
		`volume of NFS by itself`: {claim.NoDirect,
			replace(corev1.PersistentVolumeSource{NFS: &corev1.NFSVolumeSource{}})},
		`the CSI driver "rbd.csi.ceph.com" by itself`: {claim.NoDirect,
			replace(driver("rbd.csi.ceph.com", "h", nil))},
		"has no reference to a secret": {claim.Invalid,
			set(func(v *corev1.PersistentVolumeSource) { v.ISCSI.SecretRef = nil })},
		"-1 is not a LUN": {claim.Invalid,
			set(func(v *corev1.PersistentVolumeSource) { v.ISCSI.Lun = -1 })},
		"its iSCSI volume cannot be used": {claim.Invalid,
			set(func(v *corev1.PersistentVolumeSource) { v.ISCSI.TargetPortal = "a b" })},
		"credentials in the open": {claim.Invalid,
			replace(iscsiDriver(map[string]string{"secret": "{}"}))},
		`"lun" is "x"`:                 {claim.Invalid, replace(iscsiDriver(map[string]string{"lun": "x"}))},
		`"portals" is not a JSON list`: {claim.Invalid, replace(iscsiDriver(map[string]string{"portals": "x"}))},
		"Options.Username is missing, w": {claim.Invalid,
			set(func(*corev1.PersistentVolumeSource) {})},
		"it has no monitors": {claim.Invalid, replace(corev1.PersistentVolumeSource{
			RBD: &corev1.RBDPersistentVolumeSource{RBDImage: "a"}})},
		`by which QEMU would take the rest for options`: {claim.Invalid,
			replace(corev1.PersistentVolumeSource{RBD: &corev1.RBDPersistentVolumeSource{
				RBDImage: "a:conf=x", CephMonitors: []string{"m"}}})},
	} {
		c, v := bound(inTree(), rwo)
		one.change(c, v)
		_, err := claim.Disk(c, v, claim.Options{})
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "claim vms/data: ")
		var typed *claim.Error
		require.ErrorAs(t, err, &typed)
		require.Equal(t, one.reason, typed.Reason, want)
		require.Equal(t, typed.Driver != "", typed.Reason == claim.NoDirect)
	}

	for want, src := range map[string]corev1.PersistentVolumeSource{
		"QEMU cannot use a volume of the CSI driver": encrypted(),
		`its handle "x" does not name an image`:      driver("rbd.csi.ceph.com", "x", nil),
		"no such cluster": driver("rbd.csi.ceph.com", "x",
			map[string]string{"imageName": "a"}),
	} {
		c, v := bound(src, rwo)
		_, err := claim.Disk(c, v, claim.Options{Monitors: func(string) ([]string, error) {
			return nil, errors.New("no such cluster")
		}})
		require.ErrorContains(t, err, want)
	}

	c, v := bound(iscsiDriver(nil), rwo)
	_, err := claim.Disk(c, v, claim.Options{Device: libvirt.Device{Dev: "hda"}})
	require.ErrorContains(t, err, "Device.Dev")
}

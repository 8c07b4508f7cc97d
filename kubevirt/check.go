package kubevirt

import (
	"bytes"
	"cmp"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/libvirt"
)

// Promise describes the disks that a hook sidecar would give a machine.
type Promise struct {
	Container string   // its name
	Image     string   // of the container
	Args      []string // of its command; none: those of the image
	Claim     string   // claim for the disks; "": none
	ClaimPath string   // mount point of the claim
	Set       string   // the VMIdentitySet of the disk; "": none
	Other     bool     // it runs another program, which Check does not know
	Drained   bool     // evictionStrategy None: a drain stops the machine
	// Guest describes how the guest sees each disk in annotations, or else all of them.
	Guest []string
}

// Check predicts the work of hooks from the text of a VirtualMachineInstance, or of an object that
// makes some, as JSON. It knows neither the disks in images nor the cluster. It returns the valid
// part even with an error. strict is nil, or checks the arguments of a sidecar of ours.
func Check(text []byte, strict func(args []string) error) (all []Promise, err error) {
	m, above, err := parseTemplate(text)
	if err != nil {
		return nil, err
	}
	var wrong []error
	for _, a := range slices.Sorted(maps.Keys(above)) {
		if a == sidecarsAnnotation || strings.HasPrefix(a, annotationPrefix) {
			wrong = append(wrong, fmt.Errorf("annotation %s is on the object itself, where nobody "+
				"looks for it: write it into spec.template.metadata.annotations", a))
		}
	}
	for _, a := range slices.Sorted(maps.Keys(m.Metadata.Annotations)) {
		if strings.HasPrefix(a, hooksPrefix) && a != sidecarsAnnotation {
			wrong = append(wrong, fmt.Errorf("annotation %s is unknown: want %s", a,
				sidecarsAnnotation))
		}
	}
	sidecars, err := m.checkedSidecars()
	if err != nil {
		return nil, errors.Join(append(wrong, err)...)
	}
	said, err := m.annotations()
	wrong = append(wrong, err)
	for _, a := range said {
		if err := new(wish{said: map[string]string{}}).parse(a.key, a.value); err != nil {
			wrong = append(wrong, fmt.Errorf("annotation %s: %w", a.annotation, err))
		}
	}
	sets, err := m.sets(len(sidecars))
	wrong = append(wrong, err)
	if len(sidecars) == 0 && len(said) > 0 {
		wrong = append(wrong, fmt.Errorf("there is no annotation %s, so nobody serves a disk",
			sidecarsAnnotation))
	}
	domain, err := m.domain()
	if err != nil {
		return nil, err
	}
	bad := errors.Join(wrong...) != nil // the same errors would appear again below
	for i, s := range sidecars {
		p := Promise{Container: sidecarPrefix + strconv.Itoa(i), Image: s.Image, Args: s.Args,
			Set: sets[i], Other: len(s.Command) > 0 || s.ConfigMap != nil,
			Drained: m.Spec.EvictionStrategy == "None"}
		if s.PVC != nil {
			p.Claim, p.ClaimPath = s.PVC.Name, s.PVC.VolumePath
		}
		if strict != nil && len(s.Args) > 0 && !p.Other {
			if err := strict(s.Args); err != nil {
				wrong = append(wrong, fmt.Errorf("%s: args: %w", p.Container, err))
			}
		}
		if !bad && !p.Other {
			disks := m.supposed(p.Container, said)
			domain, err = Edit(Call{Domain: domain, VMI: m.text}, disks, p.Container)
			if err != nil {
				return all, errors.Join(append(wrong, fmt.Errorf("%s: %w", p.Container, err))...)
			}
			if p.Guest, err = seen(domain, disks); err != nil {
				return all, err
			}
		}
		all = append(all, p)
	}
	return all, errors.Join(wrong...)
}

// template is a machine as written by a person, with its text.
type template struct {
	*machine
	text []byte
	Spec struct {
		EvictionStrategy string `json:"evictionStrategy"`
		Domain           struct {
			Devices struct {
				Disks []struct {
					Name      string `json:"name"`
					BootOrder *uint  `json:"bootOrder"`
					Serial    string `json:"serial"`
					Disk      *bus   `json:"disk"`
					LUN       *bus   `json:"lun"`
					CDRom     *bus   `json:"cdrom"`
				} `json:"disks"`
				Interfaces []struct {
					BootOrder *uint `json:"bootOrder"`
				} `json:"interfaces"`
				Inputs []struct{} `json:"inputs"`
			} `json:"devices"`
		} `json:"domain"`
	} `json:"spec"`
}

type bus struct {
	Bus string `json:"bus"`
}

// parseTemplate finds the machine in an object, and the annotations of an object that only makes
// machines.
func parseTemplate(text []byte) (m *template, above map[string]string, err error) {
	var object struct {
		Kind     string `json:"kind"`
		Metadata struct {
			Annotations map[string]string `json:"annotations"`
		} `json:"metadata"`
		Spec struct {
			Template *json.RawMessage `json:"template"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(text, &object); err != nil {
		return nil, nil, fmt.Errorf("it is not understood: %w", err)
	}
	if object.Kind != "VirtualMachineInstance" {
		if object.Spec.Template == nil {
			return nil, nil, fmt.Errorf("a %s has no machine in spec.template", object.Kind)
		}
		text, above = *object.Spec.Template, object.Metadata.Annotations
	}
	m = &template{text: text}
	if m.machine, err = parseMachine(text); err == nil {
		err = json.Unmarshal(text, &m)
	}
	return m, above, err
}

// checkedSidecars are the hook sidecars, without fields that KubeVirt does not know: it ignores
// them.
func (m *template) checkedSidecars() (all []sidecar, err error) {
	if all, err = m.sidecars(); err != nil || len(all) == 0 {
		return all, err
	}
	strict := json.NewDecoder(strings.NewReader(m.Metadata.Annotations[sidecarsAnnotation]))
	strict.DisallowUnknownFields()
	if err := strict.Decode(&all); err != nil {
		return nil, fmt.Errorf("annotation %s: %w", sidecarsAnnotation, err)
	}
	for i, s := range all {
		switch at := fmt.Sprintf("annotation %s: entry %d", sidecarsAnnotation, i); {
		case s.Image == "":
			return nil, fmt.Errorf("%s has no image", at)
		case s.PVC != nil && (s.PVC.Name == "" || !strings.HasPrefix(s.PVC.VolumePath, "/")):
			return nil, fmt.Errorf("%s: pvc needs a name, and an absolute path as volumePath", at)
		}
	}
	return all, nil
}

// keySet is the annotation that names the VMIdentitySet of a disk, which a number may follow.
const keySet = annotationPrefix + "identity-set"

// sets are the VMIdentitySets of the hook sidecars' disks, by their numbers.
func (m *template) sets(sidecars int) (map[int]string, error) {
	all := map[int]string{}
	for a, set := range m.Metadata.Annotations {
		rest, ok := strings.CutPrefix(a, keySet)
		if !ok {
			continue
		}
		n, err := strconv.Atoi(cmp.Or(rest, ".0")[1:])
		if err != nil || rest != "" && (n < 1 || n > 9 || rest != fmt.Sprintf(".%d", n)) {
			return all, fmt.Errorf("annotation %s is unknown: want %s, or %s.1 to .9", a, keySet,
				keySet)
		}
		if n >= sidecars {
			return all, fmt.Errorf("annotation %s: there is no hook sidecar %s%d in %s", a,
				sidecarPrefix, n, sidecarsAnnotation)
		}
		all[n] = set
	}
	if _, first := all[0]; !first && len(all) > 0 {
		return all, fmt.Errorf(
			"annotation %s is missing: the disk without a number has to be there", keySet)
	}
	return all, nil
}

// supposed are disks that a hook sidecar might serve: those in annotations, or one.
func (m *template) supposed(container string, said []statement) (all []Disk) {
	disk := func(number uint16, name string) {
		at := "/var/run/kubevirt-hooks/" + container + "/disk/"
		all = append(all, Disk{Number: number, Remote: true,
			Export:    libvirt.Export{Name: name, Socket: at + "nbd.sock"},
			VhostUser: libvirt.VhostUser{Socket: at + "vhost-user/" + strconv.Itoa(int(number))}})
	}
	others := uint16(1 << 10) // not in any annotation
	for _, a := range said {
		n, err := strconv.ParseUint(a.about, 10, 16)
		known := slices.ContainsFunc(all, func(d Disk) bool { return d.rank(a, "") > 2 })
		switch {
		case !m.alone() || a.about == "" || a.about == container || known:
		case err == nil:
			disk(uint16(n), "LUN "+a.about)
		default:
			others++
			disk(others, a.about)
		}
	}
	if len(all) == 0 {
		disk(1, container)
	}
	return all
}

// domain is the part of KubeVirt's domain for the machine that matters here.
func (m *template) domain() ([]byte, error) {
	devices := &libvirtxml.DomainDeviceList{}
	letters := map[string]byte{}
	for _, d := range m.Spec.Domain.Devices.Disks {
		kind, at := "disk", d.Disk
		if d.LUN != nil {
			kind, at = "lun", d.LUN
		} else if d.CDRom != nil {
			kind, at = "cdrom", d.CDRom
		}
		on := "sata"
		if at != nil && at.Bus != "" {
			on = at.Bus
		} else if slices.Contains([]string{"arm64", s390x}, m.machine.Spec.Architecture) {
			on = "virtio" // their QEMU has no SATA
		}
		prefix := prefix(libvirt.Bus(on))
		disk := libvirtxml.DomainDisk{Device: kind, Serial: d.Serial,
			Driver: &libvirtxml.DomainDiskDriver{Name: "qemu", Type: "raw"},
			Source: &libvirtxml.DomainDiskSource{File: &libvirtxml.DomainDiskSourceFile{
				File: "/var/run/" + d.Name}},
			Target: &libvirtxml.DomainDiskTarget{Bus: on,
				Dev: prefix + string('a'+letters[prefix])},
			Alias: &libvirtxml.DomainAlias{Name: "ua-" + d.Name}}
		letters[prefix]++
		if d.BootOrder != nil {
			disk.Boot = &libvirtxml.DomainDeviceBoot{Order: *d.BootOrder}
		}
		devices.Disks = append(devices.Disks, disk)
	}
	for _, i := range m.Spec.Domain.Devices.Interfaces {
		if i.BootOrder != nil {
			devices.Interfaces = append(devices.Interfaces, libvirtxml.DomainInterface{
				Boot: &libvirtxml.DomainDeviceBoot{Order: *i.BootOrder}})
		}
	}
	if len(m.Spec.Domain.Devices.Inputs) == 0 {
		devices.Controllers = []libvirtxml.DomainController{{Type: "usb", Model: "none"}}
	}
	text, err := (&libvirtxml.Domain{Type: "kvm", Devices: devices}).Marshal()
	return []byte(text), err
}

// seen describes how a guest sees disks in a domain.
func seen(domain []byte, disks []Disk) (all []string, err error) {
	var made libvirtxml.Domain
	if err := xml.NewDecoder(bytes.NewReader(domain)).Decode(&made); err != nil {
		return nil, err
	}
	for _, d := range disks {
		for _, is := range made.Devices.Disks {
			source, transport := is.Source, "NBD"
			switch {
			case source != nil && source.Network != nil && source.Network.Name == d.Export.Name:
			case source != nil && source.VHostUser != nil && source.VHostUser.UNIX != nil &&
				source.VHostUser.UNIX.Path == d.VhostUser.Socket:
				transport = "vhost-user"
			default:
				continue
			}
			all = append(all, d.looks(&is, transport))
		}
	}
	return all, nil
}

func (d *Disk) looks(is *libvirtxml.DomainDisk, transport string) string {
	var text strings.Builder
	if !strings.HasPrefix(d.Export.Name, sidecarPrefix) {
		fmt.Fprintf(&text, "%s: ", d.Export.Name)
	}
	fmt.Fprintf(&text, "on the bus %s, by %s", is.Target.Bus, transport)
	if is.Alias != nil && !strings.HasPrefix(is.Alias.Name, aliasPrefix) {
		fmt.Fprintf(&text, ", in the place of volume %s", strings.TrimPrefix(is.Alias.Name, "ua-"))
	}
	if is.Boot != nil {
		fmt.Fprintf(&text, ", boot order %d", is.Boot.Order)
	} else {
		text.WriteString(", not to boot from")
	}
	if is.ReadOnly != nil {
		text.WriteString(", read-only")
	}
	if is.Driver != nil && is.Driver.Cache != "" {
		fmt.Fprintf(&text, ", cache %s", is.Driver.Cache)
	}
	if is.Serial != "" {
		fmt.Fprintf(&text, ", serial number %s", is.Serial)
	}
	return text.String()
}

package kubevirt

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// sidecarsAnnotation lists the hook sidecars of a machine for KubeVirt, as JSON. KubeVirt has no
// other annotation with that prefix.
const (
	hooksPrefix        = "hooks.kubevirt.io/"
	sidecarsAnnotation = hooksPrefix + "hookSidecars"
)

// sidecarPrefix begins the name of a hook sidecar's container, which ends with its place in that
// list.
const sidecarPrefix = "hook-sidecar-"

// machine is the part of a VirtualMachineInstance that matters here.
type machine struct {
	Metadata struct {
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec struct {
		Architecture string `json:"architecture"`
		Domain       struct {
			LaunchSecurity *launchSecurity `json:"launchSecurity"`
			Devices        struct {
				UseVirtioTransitional bool `json:"useVirtioTransitional"`
				BlockMultiQueue       bool `json:"blockMultiQueue"`
			} `json:"devices"`
		} `json:"domain"`
		Volumes []struct {
			Name string `json:"name"`
		} `json:"volumes"`
	} `json:"spec"`
	Status struct {
		MigrationState *migration `json:"migrationState"`
	} `json:"status"`
}

// launchSecurity is the encryption of a guest's memory. On s390x it has no fields: that is Secure
// Execution.
type launchSecurity struct {
	SEV *struct{} `json:"sev"`
	SNP *struct{} `json:"snp"` // devices are not affected by TDX
}

// migration is the last live migration of a machine.
type migration struct {
	TargetPod  string `json:"targetPod"`
	TargetNode string `json:"targetNode"`
	Completed  bool   `json:"completed"`
	Failed     bool   `json:"failed"`
}

func parseMachine(text []byte) (*machine, error) {
	var m machine
	if err := json.Unmarshal(text, &m); err != nil {
		return nil, fmt.Errorf("the VirtualMachineInstance is not understood: %w", err)
	}
	return &m, nil
}

// migrates reports whether the machine is moving to another node.
func (m *machine) migrates() bool {
	s := m.Status.MigrationState
	return s != nil && (s.TargetPod != "" || s.TargetNode != "") && !s.Completed && !s.Failed
}

// sidecar is a hook sidecar in the machine's annotation.
type sidecar struct {
	Image           string          `json:"image"`
	ImagePullPolicy string          `json:"imagePullPolicy"`
	Command         []string        `json:"command"`
	Args            []string        `json:"args"`
	ConfigMap       json.RawMessage `json:"configMap"`
	PVC             *struct {
		Name              string `json:"name"`
		VolumePath        string `json:"volumePath"`
		SharedComputePath string `json:"sharedComputePath"`
	} `json:"pvc"`
}

// sidecars are the hook sidecars in the machine's annotation. KubeVirt names the containers by
// their places.
func (m *machine) sidecars() (all []sidecar, err error) {
	text, said := m.Metadata.Annotations[sidecarsAnnotation]
	if !said {
		return nil, nil
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("annotation %s is not understood: %w", sidecarsAnnotation, err)
	}
	return all, nil
}

// alone reports whether the machine has only one hook sidecar: then annotations for others are
// mistakes.
func (m *machine) alone() bool {
	all, err := m.sidecars()
	return err == nil && len(all) == 1
}

// Claim returns the mount point of the claim that the machine gives to its hook sidecar, "" if it
// gives none. said is false if the machine does not mention the container, such as one from an
// admission policy.
func (c *Call) Claim(container string) (dir string, said bool, err error) {
	m, err := parseMachine(c.VMI)
	if err != nil {
		return "", false, err
	}
	all, err := m.sidecars()
	if err != nil {
		return "", false, err
	}
	for i, s := range all {
		if container != fmt.Sprintf("%s%d", sidecarPrefix, i) {
			continue
		}
		if s.PVC != nil {
			dir = s.PVC.VolumePath
		}
		return dir, true, nil
	}
	return "", false, nil
}

func (m *machine) hasVolume(name string) bool { return slices.Contains(m.volumes(), name) }

func (m *machine) volumes() (names []string) {
	for _, v := range m.Spec.Volumes {
		names = append(names, v.Name)
	}
	return names
}

// Arrives reports whether the machine comes from another node by a live migration, or may do so,
// because it cannot be parsed. A hook gets no occasion. It is only called on the node where a
// machine arrives.
func (c *Call) Arrives() bool {
	if c.Occasion != OccasionUnknown {
		return c.Occasion == OccasionMigrationTarget
	}
	m, err := parseMachine(c.VMI)
	return err != nil || m.migrates()
}

// refuseMigration returns why a machine cannot move; nil: it can.
func refuseMigration(disks []Disk) error {
	var names []string
	for _, d := range disks {
		if !d.Remote {
			names = append(names, fmt.Sprintf("%q", d.Export.Name))
		}
	}
	verb := "is"
	switch {
	case len(names) == 0:
		return nil
	case len(names) > 1:
		verb = "are"
	}
	return fmt.Errorf("%s %s in the pod that the machine runs in, so after a live migration the "+
		"guest would meet another disk: stop the machine and start it again instead, or serve "+
		"the disk outside of the pod and name it here with --disk. With evictionStrategy None, "+
		"KubeVirt does not try to migrate it", strings.Join(names, ", "), verb)
}

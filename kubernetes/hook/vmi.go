package hook

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// sidecarsAnnotation is where a machine asks KubeVirt for hook sidecars: a JSON list.
const sidecarsAnnotation = "hooks.kubevirt.io/hookSidecars"

// machine is what a VirtualMachineInstance says that matters here.
type machine struct {
	Metadata struct {
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec struct {
		Volumes []struct {
			Name string `json:"name"`
		} `json:"volumes"`
	} `json:"spec"`
	Status struct {
		MigrationState *struct {
			TargetPod  string `json:"targetPod"`
			TargetNode string `json:"targetNode"`
			Completed  bool   `json:"completed"`
			Failed     bool   `json:"failed"`
		} `json:"migrationState"`
	} `json:"status"`
}

func parseMachine(text []byte) (*machine, error) {
	var m machine
	if err := json.Unmarshal(text, &m); err != nil {
		return nil, fmt.Errorf("the VirtualMachineInstance is not understood: %w", err)
	}
	return &m, nil
}

// migrates reports whether the machine is on its way to another node.
func (m *machine) migrates() bool {
	s := m.Status.MigrationState
	return s != nil && (s.TargetPod != "" || s.TargetNode != "") && !s.Completed && !s.Failed
}

// alone reports whether the machine asks for one hook sidecar: then annotations about others are
// mistakes.
func (m *machine) alone() bool {
	var sidecars []json.RawMessage
	err := json.Unmarshal([]byte(m.Metadata.Annotations[sidecarsAnnotation]), &sidecars)
	return err == nil && len(sidecars) == 1
}

func (m *machine) hasVolume(name string) bool { return slices.Contains(m.volumes(), name) }

func (m *machine) volumes() (names []string) {
	for _, v := range m.Spec.Volumes {
		names = append(names, v.Name)
	}
	return names
}

// Arrives reports whether the machine comes from another node, by a live migration. A hook is told
// no occasion; it is asked where a machine arrives, and not where it leaves.
func (c *Call) Arrives() bool {
	if c.Occasion != OccasionUnknown {
		return c.Occasion == OccasionMigrationTarget
	}
	m, err := parseMachine(c.VMI)
	return err == nil && m.migrates()
}

// refuseMigration says why a machine cannot move; nil: it can.
func refuseMigration(disks []Disk) error {
	var names []string
	for _, d := range disks {
		if !d.Elsewhere {
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

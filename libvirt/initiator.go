package libvirt

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
)

// initiatorPrefix begins the names that InitiatorName makes.
const initiatorPrefix = "iqn.2017-01.io.kubevirt:"

// maxNamePart leaves room for the machine, a colon and the domain.
const maxNamePart = (maxNameLength - len(initiatorPrefix) - 1) / 2

// The variables that tell a machine's name in a cluster, from the downward API.
const (
	envNode = "NODE_NAME"
	envPod  = "POD_NAME"
)

// InitiatorName is the iSCSI name by which a domain on a machine should log in: for
// Device.Initiator. It is the same each time, and another one for every machine and every domain.
// So the two machines of a live migration are two initiators to the target, which can then fence
// the first. QEMU's own name is made of the domain's UUID, which both machines have.
//
// An empty machine is Machine, this one. A domain is known by its name or UUID. Without one, all
// domains of the machine have the same name, and a write-exclusive LUN does not keep them apart.
// What iSCSI names cannot have is replaced, and a hash added.
func InitiatorName(machine, domain string) (string, error) {
	if machine == "" {
		var err error
		if machine, err = Machine(); err != nil {
			return "", err
		}
	}
	name := initiatorPrefix + namePart(machine)
	if domain != "" {
		name += ":" + namePart(domain)
	}
	return name, nil
}

// Machine is what this machine is called, unlike every other that a guest can migrate to: the
// environment's NODE_NAME, else its POD_NAME, else the hostname. Pods of KubeVirt need one of the
// variables, as their hostname is the virtual machine's.
func Machine() (string, error) {
	for _, variable := range []string{envNode, envPod} {
		if name := os.Getenv(variable); name != "" {
			return name, nil
		}
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("this machine has no name: %w: set %s", err, envNode)
	}
	if err := distinguishes(name); err != nil {
		return "", err
	}
	return name, nil
}

// distinguishes refuses hostnames that many machines have.
func distinguishes(hostname string) error {
	first, _, _ := strings.Cut(hostname, ".")
	switch strings.ToLower(first) {
	case "":
		return errors.New("this machine has no hostname: set " + envNode)
	case "localhost", "(none)":
		return fmt.Errorf("this machine is called %q, as others are: set %s", hostname, envNode)
	}
	return nil
}

// namePart makes a part of an iSCSI name of a text. One that has to be changed gets a hash, so that
// it stays apart from others.
func namePart(text string) string {
	part := strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9', r == '-', r == '.':
			return r
		case 'A' <= r && r <= 'Z':
			return r - 'A' + 'a'
		}
		return '-'
	}, text)
	if part == text && len(part) <= maxNamePart {
		return part
	}
	hash := sha256.Sum256([]byte(text))
	suffix := "-" + hex.EncodeToString(hash[:6])
	return part[:min(len(part), maxNamePart-len(suffix))] + suffix
}

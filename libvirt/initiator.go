package libvirt

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
)

// initiatorPrefix is the prefix of InitiatorName's names.
const initiatorPrefix = "iqn.2017-01.io.kubevirt:"

// maxNamePart leaves room for the machine, a colon and the domain.
const maxNamePart = (maxNameLength - len(initiatorPrefix) - 1) / 2

// The variables with a machine's name in a cluster, from the downward API.
const (
	envNode = "NODE_NAME"
	envPod  = "POD_NAME"
)

// InitiatorName returns the iSCSI name with which a domain on a machine should log in: use it for
// Device.Initiator. It is the same each time, and differs for every machine and every domain. So
// the target sees the two machines of a live migration as two initiators, and can fence the first.
// QEMU's own name comes from the domain's UUID, which both machines have.
//
// An empty machine means Machine, this one. domain is the domain's name or UUID. If it is empty,
// all domains of the machine have the same name, and a write-exclusive LUN does not keep them
// apart. Characters that an iSCSI name cannot have are replaced, and a hash is added.
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

// Machine returns the name of this machine. It must differ from that of every other machine that a
// guest can migrate to. It is the environment's NODE_NAME, else its POD_NAME, else the hostname.
// Pods of KubeVirt need one of the variables, because their hostname is the virtual machine's.
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

// distinguishes refuses a hostname that many machines have, such as localhost.
func distinguishes(hostname string) error {
	first, _, _ := strings.Cut(hostname, ".")
	switch strings.ToLower(first) {
	case "":
		return errors.New("this machine has no hostname: set " + envNode)
	case "localhost", "(none)":
		return fmt.Errorf("this machine is called %q, like many others: set %s", hostname, envNode)
	}
	return nil
}

// namePart turns a text into a part of an iSCSI name. If it has to change the text it adds a hash,
// so that different texts stay different.
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

package libvirt

import (
	"libvirt.org/go/libvirtxml"
)

// Secret returns the <secret> element that a disk with this credential refers to. libvirt keeps it
// across restarts, and its clients cannot read it. Without a usage name the secret gets its UUID as
// one, because libvirt lets disks use only secrets that are for iSCSI. The value, which is the CHAP
// password, is set separately.
func Secret(c Credential) (*libvirtxml.Secret, error) {
	c = c.withDefaults()
	var p problems
	c.checkReference(&p, "Credential")
	if err := p.err(); err != nil {
		return nil, err
	}
	usage := c.SecretUsage
	if usage == "" {
		usage = c.SecretUUID
	}
	return &libvirtxml.Secret{
		Ephemeral: "no",
		Private:   "yes",
		UUID:      c.SecretUUID,
		Usage:     &libvirtxml.SecretUsage{Type: "iscsi", Target: usage},
	}, nil
}

// SecretXML returns Secret as indented text without a newline at the end. It is the document for
// virSecretDefineXML and `virsh secret-define`.
func SecretXML(c Credential) (string, error) {
	secret, err := Secret(c)
	return text("secret", secret, err)
}

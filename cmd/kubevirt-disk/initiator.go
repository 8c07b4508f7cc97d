package main

import "strings"

// qemuDefault begins the initiator name that QEMU takes where it is given none: the UUID of its
// machine follows, or the machine's name.
const qemuDefault = "iqn.2008-11.org.linux-kvm"

// explainInitiators adds to a message what names in it mean that nobody has chosen.
func explainInitiators(message string) string {
	if !strings.Contains(message, qemuDefault) {
		return message
	}
	return message + "\n" + qemuDefault + ":... is the default of a QEMU: its machine's UUID or " +
		"name follows, which source and destination " +
		"of a live migration have in common. They can be told apart where each has a name of its " +
		"own (kubevirt-disk xml --initiator-name, " +
		"or initiator-name of QEMU's -iscsi)"
}

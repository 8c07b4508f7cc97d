package main

import "strings"

// qemuDefault begins the initiator name that QEMU uses if it gets none. The UUID or the name of its
// machine follows.
const qemuDefault = "iqn.2008-11.org.linux-kvm"

// explainInitiators explains the default initiator names in a message.
func explainInitiators(message string) string {
	if !strings.Contains(message, qemuDefault) {
		return message
	}
	return message + "\n" + qemuDefault + ":... is QEMU's default: the UUID or name of its " +
		"machine follows, which is the same on both sides of a live migration. Give each side a " +
		"name of its own (kubevirt-disk xml --initiator-name, or initiator-name of QEMU's -iscsi)"
}

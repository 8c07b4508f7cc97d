// Package xml makes libvirt's elements for a LUN, an export, a disk by vhost-user or a local image:
// from flags, or from the status of a running daemon. Package libvirt renders them.
package xml

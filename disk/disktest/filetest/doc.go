// Package filetest has helpers that tests of disks and images share: files, small file systems that
// fill up, qemu-img, and the model of a machine that crashes. It is for tests only.
package filetest

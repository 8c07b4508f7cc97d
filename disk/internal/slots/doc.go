// Package slots bounds the background work of a server: how many workers of all its disks run at
// once. That also bounds the memory of their buffers and the processor time that they use.
//
// disk/instance makes those of a server: one for disks that copy, one for disks whose image is far
// away, and one for hashes. A worker acquires a slot, does steps as long as Slot.More allows, and
// releases the slot. A worker that rests or waits for space releases its slot first. If one hangs
// in storage, the watchdog passes its slot on.
package slots

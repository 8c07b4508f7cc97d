// Package rtnl asks the kernel to set up network interfaces (rtnetlink(7)), and hears what it
// learns from IPv6 routers. The guest's init uses it, see network.go there.
//
// A message is a header of 16 bytes, a fixed part by its type, and attributes: length, type, value,
// padded to 4 bytes, in the machine's byte order.
package rtnl

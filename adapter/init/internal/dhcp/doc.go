// Package dhcp is DHCP's messages (RFC 2131, 2132): bytes in and bytes out. The guest's init sends
// and receives them, see network.go there.
//
// We have our own, because a library for it brings a network stack along, and every byte of the
// init is loaded at each boot: the libraries that we found double it.
//
// Parse takes whatever comes from the network. It bounds every length before it reads, and never
// returns part of a message.
package dhcp

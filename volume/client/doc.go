// Package client asks a server of volumes (volume/server) for volumes. The command upload uses it,
// and so does a handler that makes a machine's disk.
//
// New makes a Client from the server's address and a token or a certificate; on loopback the server
// may need neither. Provide returns when a machine can use the disk, and Delete removes it when the
// machine is gone. Any number of goroutines may call the methods. They return the server's answer;
// errors.As finds the *api.Error of a refusal. A request that failed because of the network may
// have been carried out. Every request can safely be sent again.
package client

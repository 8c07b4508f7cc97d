// Package client asks a server of volumes (volume/server) for volumes. Controllers and commands use
// it.
//
// New makes a Client from the server's address and a token or a certificate; on loopback the server
// may need neither. Any number of goroutines may call its methods. They return the server's answer;
// errors.As finds the *api.Error of a refusal. A request that failed because of the network may
// have been carried out. Every request can safely be sent again.
package client

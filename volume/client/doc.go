// Package client asks a server of volumes (volume/server) for them. Controllers and commands use
// it.
//
// New makes a Client of the server's address and of what it shows there: a token, a certificate, or
// on loopback neither. Its methods may be called by any number of goroutines. They return what the
// server answers; a refusal is an *api.Error, which errors.As finds. A request that came to nothing
// because of the network may have been carried out: all of them can be made again.
package client

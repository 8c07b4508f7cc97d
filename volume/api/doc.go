// Package api has the types of the interface that makes volumes on demand: requests, answers and
// refusals.
//
// The server (volume/server) and the client (volume/client) use the same types, and so does the
// Kubernetes controller. The package needs nothing but the standard library. The interface as a
// document for people and other programs is openapi.yaml of volume/server.
package api

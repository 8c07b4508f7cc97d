// Package server answers requests for volumes over HTTP: PUT, GET and DELETE of /volume and
// /volume/NAME, GET of /volumes and of /openapi.yaml, which describes all of it.
//
// A daemon makes a Server of a volume.Manager, calls Serve with a listener when it can make
// volumes, and Shutdown at the end. New refuses settings that would let another machine make
// volumes without proving that it may.
//
// It guarantees that no request is looked at before its sender has shown the token or certificate
// that is asked for. The comparison takes the same time whatever is wrong, and no token is ever
// logged or answered. Changed certificates, tokens and authorities take effect when their files
// change. A client can use only a bounded part of memory, time and connections.
package server

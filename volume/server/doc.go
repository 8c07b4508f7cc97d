// Package server answers HTTP requests for volumes: PUT, GET and DELETE of /volume and
// /volume/NAME, GET of /volumes and of /openapi.yaml, which describes all of this.
//
// A daemon makes a Server of a volume.Manager, calls Serve with a listener when it can make
// volumes, and Shutdown at the end. New refuses settings that would let another machine make
// volumes without authentication.
//
// It guarantees that it acts on no request before the sender has shown the required token or
// certificate. The comparison takes the same time for every wrong token, and no token appears in a
// log or an answer. Changed certificates, tokens and authorities take effect when their files
// change. A client can use only a limited amount of memory, time and connections.
package server

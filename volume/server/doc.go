// Package server answers requests for volumes over HTTP: PUT, GET and DELETE of /volume and
// /volume/NAME, GET of /volumes and of /openapi.yaml, which describes all of it.
//
// A daemon makes a Server of a volume.Manager, calls Serve with a listener when volumes can be
// asked for, and Shutdown at the end. New refuses settings under which somebody else than this
// machine could make volumes without having shown that it may.
//
// What it guarantees: no request is looked at before its sender has shown a token or a certificate
// where one is asked for; the comparison takes the same time whatever is wrong; no token is ever
// logged or answered. A certificate, a token and the authority of certificates are read again when
// their files change. A client can take no more than a bounded part of memory, time and
// connections.
package server

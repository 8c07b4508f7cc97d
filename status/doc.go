// Package status has the types in which a daemon tells what it is doing: the page /status, the
// sessions, and the requests and answers of its control socket, all as JSON. It imports nothing of
// the project, so whoever reads or asks gets no server with it.
//
// The daemon fills a Status, and package pages serves it. The SCSI device and the target fill their
// parts, Trouble and Session. The command xml, healthchecks and the Kubernetes controller decode
// it. Package internal/control sends and answers the requests.
//
// # Compatibility
//
// Daemons and those who ask them are of different versions. So fields are only added: a field keeps
// its name, its type and its meaning, and the values that it can have get company at most. Whoever
// decodes ignores fields that it does not know, and takes an absent field as its zero value. The
// requests are the exception: a daemon refuses a field that it does not know, because it could not
// do what that asks for.
//
// No field ever holds a secret.
package status

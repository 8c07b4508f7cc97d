// Package status has the types in which a daemon reports its state: the page /status, the sessions,
// and the requests and answers of its control socket, all as JSON. It imports nothing of the
// project, so a client that imports it gets no server code.
//
// The daemon fills a Status, and package pages serves it. The SCSI device and the target fill their
// parts, Trouble and Session. The command xml, healthchecks and the Kubernetes controller decode
// it. Package internal/control sends and answers the requests.
//
// # Compatibility
//
// Daemons and their clients may have different versions. So fields are only added: a field keeps
// its name, its type and its meaning, and at most gets further values. Clients ignore unknown
// fields, and take an absent field as its zero value. Requests are the exception: a daemon refuses
// an unknown field, because it could not carry it out.
//
// No field ever holds a secret.
package status

package nbd

import (
	"crypto/tls"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/tlsfiles"
)

// LoadTLS makes the TLS of a portal from PEM files: the server's certificate and key, and the
// certificates of those who sign the clients'. A file that changes is read again at the next
// connection: see tlsfiles.Config. Log may be nil.
func LoadTLS(certFile, keyFile, clientCAFile string, log *zap.Logger) (*tls.Config, error) {
	if log == nil {
		log = zap.NewNop()
	}
	return tlsfiles.Config(tlsfiles.Files{Of: "the NBD server", Cert: certFile, Key: keyFile,
		ClientCA: clientCAFile}, &tls.Config{
		// Every implementation must support it ("TLS versions" of the specification), and the
		// kernel's client has nothing newer.
		MinVersion: tls.VersionTLS12,
		ClientAuth: tls.RequireAndVerifyClientCert,
		// a resumed session would not ask the changed files
		SessionTicketsDisabled: true,
	}, log)
}

// LoadClientTLS makes the TLS of a client from PEM files: what it shows to a server that is called
// host, and the certificates of those who may have signed the server's: see tlsfiles.ForClient.
func LoadClientTLS(certFile, keyFile, serverCAFile, host string) (*tls.Config, error) {
	return tlsfiles.ForClient(certFile, keyFile, serverCAFile, host)
}

package nbd

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/tlsfiles"
	"kubevirt.io/disk/serving"
)

// LoadTLS makes the TLS configuration of a portal from PEM files: the server's certificate and key,
// and the certificates of the authorities that sign the clients'. A file that changes is read again
// at the next connection: see tlsfiles.Config. log may be nil.
func LoadTLS(certFile, keyFile, clientCAFile string, log *zap.Logger) (*tls.Config, error) {
	log = cmp.Or(log, zap.NewNop())
	return tlsfiles.Config(tlsfiles.Files{Of: "the NBD server", Cert: certFile, Key: keyFile,
		ClientCA: clientCAFile}, &tls.Config{
		// Every implementation must support it ("TLS versions" of the specification), and the
		// kernel's client has nothing newer.
		MinVersion: tls.VersionTLS12,
		ClientAuth: tls.RequireAndVerifyClientCert,
		// a resumed session would not read the changed files
		SessionTicketsDisabled: true,
	}, log)
}

// LoadClientTLS makes the TLS configuration of a client from PEM files: its own certificate and
// key, and the authorities that it trusts to sign the certificate of the server host. See
// tlsfiles.ForClient.
func LoadClientTLS(certFile, keyFile, serverCAFile, host string) (*tls.Config, error) {
	return tlsfiles.ForClient(certFile, keyFile, serverCAFile, host)
}

// certificateName returns the name of the client with this certificate, and the form of the name,
// such as DNS.
func certificateName(state tls.ConnectionState) (name, form string, err error) {
	if len(state.VerifiedChains) == 0 || len(state.PeerCertificates) == 0 {
		return "", "", errors.New("the client's certificate is not verified")
	}
	cert := state.PeerCertificates[0]
	name, form = cert.Subject.CommonName, "common name"
	if len(cert.DNSNames) > 0 {
		name, form = cert.DNSNames[0], "DNS name"
	}
	if len(cert.URIs) > 0 {
		name, form = cert.URIs[0].String(), "URI"
	}
	if name == "" {
		return "", "", errors.New("the client's certificate has no name: it needs a URI, a DNS " +
			"name or a common name")
	}
	if name = serving.CertificatePrefix + name; !serving.ValidName(name) {
		return "", "", fmt.Errorf("the name of the client's certificate, %q, is too long or has "+
			"spaces: give it a URI, a DNS name or a common name without", name)
	}
	return name, form, nil
}

// holderOfName is the client that has a name: the form of the name in its certificate, and the
// number of its connections.
type holderOfName struct {
	form  string
	conns int
}

// enlist notes a connection of a client whose certificate has the name in this form. An authority
// may let a client choose its common name, but check DNS names. So the same name in different forms
// means two clients. The first one has the name as long as it is connected, and the other gets an
// error.
func (s *Server) enlist(c *conn, name, form string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.named[name]
	if h == nil {
		h = &holderOfName{form: form}
		s.named[name] = h
	}
	if h.form != form {
		return fmt.Errorf("this client is %s by the %s in its certificate, and another one that "+
			"is here by the %s: give one of them another name", name, form, h.form)
	}
	h.conns++
	c.enlisted = true
	return nil
}

// delist ends the entry that enlist has made, when the connection's requests have left the disk.
func (s *Server) delist(c *conn) {
	c.AwaitRequests()
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.named[c.name]; h != nil && c.enlisted {
		if h.conns--; h.conns == 0 {
			delete(s.named, c.name)
		}
	}
}

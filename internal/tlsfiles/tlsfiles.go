// Package tlsfiles has the TLS of servers whose certificate, key and authorities are in files that
// are replaced while they serve, and that of their clients. The server of volumes and that of NBD
// use it, and the client of NBD.
package tlsfiles

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/osfile"
)

// Files are the files of a server, PEM.
type Files struct {
	Of        string // the user of the files in messages, such as "the NBD server"
	Cert, Key string
	// ClientCA has the certificates that may have signed a client's certificate. "": clients need
	// no certificate, whatever ClientAuth says.
	ClientCA string
}

// Config returns base with the content of the files. It reads them once, so that an error in them
// is reported at once, and again at each connection. While they cannot be used, for example because
// they are being replaced, the former ones stay in use, and the log says why.
func Config(f Files, base *tls.Config, log *zap.Logger) (*tls.Config, error) {
	s := &server{Files: f, base: base, log: log}
	if _, err := s.load(); err != nil {
		return nil, err
	}
	config := base.Clone()
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		config, err := s.load()
		if err != nil {
			s.complain(err)
		}
		return config, nil // the former one, while the files cannot be used
	}
	return config, nil
}

// server is a server with files.
type server struct {
	Files
	base *tls.Config
	log  *zap.Logger

	mu     sync.Mutex
	config *tls.Config // guarded by mu; made of the last read files
	files  [3][]byte   // guarded by mu; the content of these files
	told   string      // guarded by mu; the last logged problem with the files
}

// complain logs a problem with the files, once.
func (s *server) complain(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if text := err.Error(); text != s.told {
		s.told = text
		s.log.Warn("the certificate files of "+s.Of+" cannot be used: the former ones stay in use",
			zap.Error(err))
	}
}

// load returns the configuration of the files. If it cannot use them, it returns the former one and
// the error.
func (s *server) load() (*tls.Config, error) {
	var files [3][]byte
	var err error
	for i, path := range []string{s.Cert, s.Key, s.ClientCA} {
		if path != "" && err == nil {
			files[i], err = osfile.ReadText(path)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		return s.config, fmt.Errorf("the certificate of %s: %w", s.Of, err)
	}
	if s.config != nil && equal(files, s.files) {
		s.told = ""
		return s.config, nil
	}
	config, err := s.configOf(files)
	if err != nil {
		return s.config, err
	}
	if s.config != nil {
		s.log.Info("the certificate of " + s.Of + " has changed, and was read again")
	}
	s.config, s.files, s.told = config, files, ""
	return config, nil
}

func equal(x, y [3][]byte) bool {
	for i := range x {
		if !bytes.Equal(x[i], y[i]) {
			return false
		}
	}
	return true
}

func (s *server) configOf(files [3][]byte) (*tls.Config, error) {
	cert, err := tls.X509KeyPair(files[0], files[1])
	if err != nil {
		return nil, fmt.Errorf("the certificate %q and the key %q cannot be used: %w", s.Cert,
			s.Key, err)
	}
	if end := cert.Leaf.NotAfter; time.Now().After(end) {
		s.log.Warn("the certificate of "+s.Of+" has expired, so clients refuse it: replace it",
			zap.String("certificate", s.Cert), zap.Time("expired", end))
	}
	config := s.base.Clone()
	config.Certificates = []tls.Certificate{cert}
	if s.ClientCA == "" {
		config.ClientAuth = tls.NoClientCert
		return config, nil
	}
	config.ClientCAs = x509.NewCertPool()
	if !config.ClientCAs.AppendCertsFromPEM(files[2]) {
		return nil, fmt.Errorf("%q has no certificate (PEM) of an authority", s.ClientCA)
	}
	return config, nil
}

// ForClient returns the configuration of a client for the server host: TLS 1.3, with the
// certificate and the key in these files, if they are named. The server's certificate must be
// signed by an authority in serverCA; "": by one that the system trusts. Call it before each
// connection, so that replaced files take effect.
func ForClient(cert, key, serverCA, host string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS13, ServerName: host}
	if cert != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("the certificate %q and the key %q cannot be used: %w", cert,
				key, err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	if serverCA == "" {
		return config, nil
	}
	text, err := osfile.ReadText(serverCA)
	if err != nil {
		return nil, fmt.Errorf("the authorities of the server: %w", err)
	}
	config.RootCAs = x509.NewCertPool()
	if !config.RootCAs.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%q has no certificate (PEM) of an authority", serverCA)
	}
	return config, nil
}

package plane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// users may log in with a token: a name for files, the user, its groups.
var users = []struct{ name, user, groups string }{
	{"admin", "admin", "system:masters"},
	{"manager", "system:kube-controller-manager", ""},
	{"scheduler", "system:kube-scheduler", ""},
}

// authority is a certificate authority for one run.
type authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pem  []byte
}

// credentials makes the keys and tokens of the processes, and the administrator's Config.
func (p *Plane) credentials() error {
	var err error
	if p.ca, err = newAuthority(); err != nil {
		return err
	}
	accounts, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	accountsKey, err := x509.MarshalECPrivateKey(accounts)
	if err != nil {
		return err
	}
	accountsPub, err := x509.MarshalPKIXPublicKey(accounts.Public())
	if err != nil {
		return err
	}
	cert, key, err := p.ca.issue("kube-apiserver")
	if err != nil {
		return err
	}
	tokens := map[string]string{}
	var csv strings.Builder
	for _, u := range users {
		tokens[u.name] = rand.Text()
		fmt.Fprintf(&csv, "%s,%s,%s,%q\n", tokens[u.name], u.user, u.name, u.groups)
	}
	p.Config = &rest.Config{BearerToken: tokens["admin"], QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: p.ca.pem}}
	return errors.Join(
		p.write("ca.crt", p.ca.pem), p.write("server.crt", cert), p.write("server.key", key),
		p.write("accounts.key", encode("EC PRIVATE KEY", accountsKey)),
		p.write("accounts.pub", encode("PUBLIC KEY", accountsPub)),
		p.write("tokens.csv", []byte(csv.String())),
		p.write("manager.token", []byte(tokens["manager"])),
		p.write("scheduler.token", []byte(tokens["scheduler"])),
	)
}

// kubeconfigs writes a file for each user, now that the server's port is known.
func (p *Plane) kubeconfigs() error {
	for _, u := range users {
		config := rest.CopyConfig(p.Config)
		if token, err := os.ReadFile(p.path(u.name + ".token")); err == nil {
			config.BearerToken = string(token)
		}
		if err := Kubeconfig(config, p.path(u.name+".kubeconfig")); err != nil {
			return err
		}
	}
	return nil
}

// Kubeconfig writes a file with which kubectl and other binaries use config.
func Kubeconfig(config *rest.Config, path string) error {
	const name = "test"
	return clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{
			name: {Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{name: {Token: config.BearerToken}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name}},
		CurrentContext: name,
	}, path)
}

func (p *Plane) write(name string, data []byte) error {
	return os.WriteFile(filepath.Join(p.Dir, name), data, 0o600)
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1),
		Subject:   pkix.Name{CommonName: "plane"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &authority{key: key, cert: cert, pem: encode("CERTIFICATE", der)}, err
}

// issue makes a certificate for a server on loopback.
func (a *authority) issue(name string) (cert, key []byte, err error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:   pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		DNSNames:    []string{"localhost"}}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, k.Public(), a.key)
	if err != nil {
		return nil, nil, err
	}
	keyDER, err := x509.MarshalECPrivateKey(k)
	return encode("CERTIFICATE", der), encode("EC PRIVATE KEY", keyDER), err
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

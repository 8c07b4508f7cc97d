// Package kubernetes tests the controller and everything that it installs on a real control plane;
// see package plane. It has only tests.
package kubernetes

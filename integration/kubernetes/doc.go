// Package kubernetes tests the controller and what it installs against a real control plane, see
// package plane. It has tests only.
package kubernetes

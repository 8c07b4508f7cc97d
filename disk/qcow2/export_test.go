package qcow2

// WithClusterBits are options for an image of other clusters than are written outside of tests.
func (o WriteOptions) WithClusterBits(bits uint) WriteOptions {
	o.clusterBits = bits
	return o
}

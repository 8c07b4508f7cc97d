package qcow2

// WithClusterBits are options for an image with cluster sizes that only tests write.
func (o WriteOptions) WithClusterBits(bits uint) WriteOptions {
	o.clusterBits = bits
	return o
}

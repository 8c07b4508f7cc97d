package served

import (
	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/status"
)

// measureUsageTypes tells the metrics which storages there are.
func (d *Disks) measureUsageTypes() {
	for _, name := range d.opt.UsageTypes.Names() {
		space := &gauge[disk.Usage]{question: func() (disk.Usage, error) {
			free, err := image.AvailableSpace(d.opt.UsageTypes[name])
			return disk.Usage{Available: free}, err
		}}
		d.storages = append(d.storages, space)
		d.metrics.AddUsageType(metrics.UsageType{Name: name, Space: func() *disk.Usage {
			free := space.latest()
			if free == nil {
				return nil
			}
			sum := disk.Usage{Available: free.Available}
			for _, s := range d.table.served() {
				of := s.look().space.latest()
				if of != nil && s.UsageType == name {
					sum.Used += of.Used
				}
			}
			return &sum
		}})
	}
}

// usageTypeStatus sums up the space of the disks of each type.
func (d *Disks) usageTypeStatus(luns []status.LUN) (all []status.UsageType) {
	spaces := readAll(d.storages)
	for i, name := range d.opt.UsageTypes.Names() {
		one := status.UsageType{Name: name, Directory: d.opt.UsageTypes[name], LUNs: []uint16{}}
		used := int64(0)
		for _, lun := range luns {
			if lun.UsageType != name {
				continue
			}
			one.LUNs = append(one.LUNs, lun.LUN)
			if lun.Space != nil {
				used += lun.Space.Used
			}
		}
		if space := spaces[i]; space != nil {
			one.Space = &status.Space{Used: used, Free: space.Available}
		}
		all = append(all, one)
	}
	return all
}

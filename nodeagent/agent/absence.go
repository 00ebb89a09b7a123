// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/podnetns"
	"ambientd/nodeagent/policyfile"
	"ambientd/nodeagent/spool"
)

// makeForAbsence makes what stands in for the agent while none runs: the events that the
// plugin keeps for it, and the policy by which the plugin decides.
func (p *parts) makeForAbsence(host *podnetns.Host) (err error) {
	p.spool, err = spool.Open(spool.Config{Dir: p.cfg.spoolDir(), Handler: countedHandler{p.enroller, p.metrics}, Logger: p.cfg.Logger})
	if err != nil {
		return err
	}
	p.forPlugin, err = policyfile.New(policyfile.Config{
		Path:       p.cfg.policyFile(),
		BootID:     host.Key().BootID,
		Namespaces: p.pods.namespaces,
		Out:        p.policy.NamespaceOut,
		Exclusions: podevent.Exclusions{
			AgentNamespace: p.cfg.AgentNamespace, OwnPods: p.cfg.OwnPods, ExcludeNamespaces: p.cfg.ExcludeNamespaces,
		},
		Logger: p.cfg.Logger,
	})
	return err
}

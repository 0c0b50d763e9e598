"""TEMP"""
from __future__ import annotations
import numpy as np
from ultraflash.graphs.sampling import pick

def greedy_verify(best, drafts):
    m=drafts.shape[1]
    ok=np.logical_and.accumulate(best[:,:m]==drafts,axis=1)
    a=ok.sum(axis=1)
    return a.astype(np.int32), best[np.arange(len(best)),a]

def block_verify(p,q,drafts,accept_u,last_u):
    assert len(p)==1
    p,q,d=p[0],q[0],drafts[0]; m=len(d); P=1.0; tau=0; Pt=1.0
    for i in range(1,m+1):
        P=min(P*p[i-1,d[i-1]]/q[i-1,d[i-1]],1.0)
        if i<m:
            r=np.maximum(P*p[i]-q[i],0).sum(); h=r/(r+1-P) if r+1-P>0 else 1.0
        else: h=P
        if accept_u[0,i-1]<=h: tau,Pt=i,P
    if tau==m: dist=p[m]
    else:
        dist=np.maximum(Pt*p[tau]-q[tau],0)
        if dist.sum()<=0: dist=p[tau]
    return np.array([tau],np.int32), np.array([pick(dist,float(last_u[0]))],np.int32)
